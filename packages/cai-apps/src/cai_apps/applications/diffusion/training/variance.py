"""The loss of a denoiser that also says how much noise to add on the way back, as DiT does.

Nichol and Dhariwal, arXiv:2102.09672: beside the noise the model gives v in [-1, 1] that picks, in logarithms, between
the least and the greatest variance a step can have. Its loss is the step's part of the variational bound; the noise is
held fixed there, so it is learned from the squared error alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class StepBounds:
    """The bounds of each step's variance. Args: kept: that of `noise_process.Diffusing`, float64 [T]."""

    kept: Tensor

    def loss(self, noise: Tensor, v: Tensor, x: Tensor, noisy: Tensor, time: Tensor) -> Tensor:
        """Bits a number, float [n].

        Args:
            noise: the model's prediction of the noise, [n, c, h, w]; no gradient flows to it.
            v: the model's prediction of the variance, of the same shape.
            x, noisy: the sample without noise, and what the model saw.
            time: int64 [n].
        """
        alpha_bar = self.kept.to(time.device)
        before = torch.cat([alpha_bar.new_ones(1), alpha_bar[:-1]])
        beta = 1 - alpha_bar / before
        least = beta * (1 - before) / (1 - alpha_bar)
        least = torch.cat(
            [least[1:2], least[1:]]
        ).log()  # no noise is added in the last step: take the one before

        def at(values: Tensor) -> Tensor:
            return values[time].view(-1, *[1] * (x.dim() - 1)).to(x.dtype)

        image = at(before.sqrt() * beta / (1 - alpha_bar))
        current = at((1 - beta).sqrt() * (1 - before) / (1 - alpha_bar))
        predicted_clean = (noisy - at((1 - alpha_bar).sqrt()) * noise.detach()) / at(alpha_bar.sqrt())
        mean, true_mean = image * predicted_clean + current * noisy, image * x + current * noisy
        share = (v + 1) / 2
        log_variance = share * at(beta.log()) + (1 - share) * at(least)
        divergence = _divergence(true_mean, at(least), mean, log_variance)
        likelihood = -_log_likelihood(x, mean, log_variance / 2)
        bits = torch.where(time.view(-1, *[1] * (x.dim() - 1)) == 0, likelihood, divergence)
        return bits.flatten(1).mean(1) / math.log(2)


def _divergence(mean: Tensor, log_variance: Tensor, other: Tensor, other_log_variance: Tensor) -> Tensor:
    """KL divergence of normal distributions, element by element."""
    apart = (mean - other).square() * torch.exp(-other_log_variance)
    return (other_log_variance - log_variance + torch.exp(log_variance - other_log_variance) + apart - 1) / 2


def _log_likelihood(x: Tensor, mean: Tensor, log_scale: Tensor) -> Tensor:
    """Return the log-likelihood of 8-bit values in [-1, 1] under a normal distribution.

    It is the logarithm of the distribution's mass within half a value to either side.
    """
    spread = torch.exp(-log_scale)
    below = torch.special.ndtr(spread * (x - mean - 1 / 255))
    above = torch.special.ndtr(spread * (x - mean + 1 / 255))
    mass = torch.where(x < -0.999, above, torch.where(x > 0.999, 1 - below, above - below))
    return mass.clamp(min=1e-12).log()
