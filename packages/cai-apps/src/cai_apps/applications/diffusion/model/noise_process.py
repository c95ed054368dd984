"""How images turn into noise, and what a denoiser learns from it: maths on plain tensors.

Two processes with the same four methods. `Diffusing` mixes x_t = sqrt(a_t) x + sqrt(1 - a_t) e in T steps (Ho et al.,
arXiv:2006.11239), `Flowing` x_s = (1 - s) x + s e on a straight line (Liu et al., arXiv:2209.03003). Both are made from
the config of a diffusers scheduler. Times are uniform numbers u in (0, 1), one a sample, drawn by who reads samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from cai_mesh.errors import ConfigError


class Process(Protocol):
    """What noise does to x, float [n, c, h, w], at times of shape [n]."""

    def time(self, u: Tensor) -> Tensor:
        """What the denoiser is told: int64 steps below T, or float32 levels of noise times T, [n]."""
        ...

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """The noisy x."""
        ...

    def target(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        """What the denoiser is to say of the noisy x, in the shape of x."""
        ...

    def weight(self, time: Tensor) -> Tensor:
        """Return the weight of the squared error of each sample, float [n]."""
        ...


@dataclass(frozen=True)
class Diffusing:
    """Args:
    kept: a_t, the share of the image's variance that is left after step t: float64 [T].
    prediction: "epsilon": the noise; "v": sqrt(a_t) e - sqrt(1 - a_t) x (Salimans and Ho, arXiv:2202.00512).
    min_snr: gamma of the weights min(SNR, gamma) / SNR for the noise, / (SNR + 1) for v (Hang et al.,
        arXiv:2303.09556); None: all weights are 1.
    """

    kept: Tensor
    prediction: str
    min_snr: float | None = None

    def time(self, u: Tensor) -> Tensor:
        return (u * len(self.kept)).long().clamp_(max=len(self.kept) - 1)

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        image, noisy = self._amounts(time, x)
        return image * x + noisy * noise

    def target(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        if self.prediction == "epsilon":
            return noise
        image, noisy = self._amounts(time, x)
        return image * noise - noisy * x

    def weight(self, time: Tensor) -> Tensor:
        alpha_bar = self.kept.to(time.device)[time]
        if self.min_snr is None:
            return torch.ones_like(alpha_bar)
        ratio = alpha_bar / (1 - alpha_bar)
        if self.prediction == "epsilon":
            return self.min_snr / ratio.clamp(min=self.min_snr)  # 1 where nothing of the image is left
        return ratio.clamp(max=self.min_snr) / (ratio + 1)

    def _amounts(self, time: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
        alpha_bar = self.kept.to(time.device)[time].view(-1, *[1] * (like.dim() - 1))
        return alpha_bar.sqrt().to(like.dtype), (1 - alpha_bar).sqrt().to(like.dtype)


@dataclass(frozen=True)
class Flowing:
    """Args:
    steps: T, what a level of noise is multiplied with for the denoiser.
    shift: moves times towards noise, as larger images need: s' = shift s / (1 + (shift - 1) s) (Esser et al.,
        arXiv:2403.03206).
    logit_normal: times are sigmoid(n) of a normal n, not uniform (same paper).
    """

    steps: int
    shift: float
    logit_normal: bool

    def time(self, u: Tensor) -> Tensor:
        level = torch.sigmoid(torch.special.ndtri(u.double())) if self.logit_normal else u.double()
        return (self.shift * level / (1 + (self.shift - 1) * level) * self.steps).float()

    def mix(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        level = self._level(time, x)
        return (1 - level) * x + level * noise

    def target(self, x: Tensor, noise: Tensor, time: Tensor) -> Tensor:
        return noise - x

    def weight(self, time: Tensor) -> Tensor:
        return torch.ones_like(time, dtype=torch.float64)

    def _level(self, time: Tensor, like: Tensor) -> Tensor:
        return (time.double() / self.steps).view(-1, *[1] * (like.dim() - 1)).to(like.dtype)


def process_of(
    scheduler: Mapping[str, Any], *, min_snr: float | None = None, logit_normal: bool = False
) -> Process:
    """The process of a diffusers scheduler's config.

    Raises:
        ConfigError: an option that the process has no use for, or a scheduler that is not known here.
    """
    diffusers_scheduler = open_scheduler(scheduler)
    kind = scheduler["_class_name"]
    if kind.startswith("FlowMatch"):
        if min_snr is not None:
            raise ConfigError("objective.min_snr does nothing for a flow", got=min_snr, fix="leave it out")
        return Flowing(
            diffusers_scheduler.config.num_train_timesteps, diffusers_scheduler.config.shift, logit_normal
        )
    if logit_normal:
        raise ConfigError(
            'objective.timesteps = "logit_normal" is for flows', got=kind, fix='set it to "uniform"'
        )
    prediction = {"v_prediction": "v"}.get(
        diffusers_scheduler.config.prediction_type, diffusers_scheduler.config.prediction_type
    )
    return Diffusing(diffusers_scheduler.alphas_cumprod.double(), prediction, min_snr)


def open_scheduler(scheduler: Mapping[str, Any]) -> Any:
    """The scheduler of diffusers that a config is of.

    Raises:
        ConfigError: there is none, it has neither steps of noise nor a flow, or its shift depends on the image's size.
    """
    import diffusers

    kind = scheduler["_class_name"]
    if not hasattr(diffusers, kind):
        raise ConfigError("a scheduler that diffusers does not know", got=kind, expected="as PNDMScheduler")
    diffusers_scheduler = getattr(diffusers, kind).from_config(dict(scheduler))
    if kind.startswith("FlowMatch"):
        if diffusers_scheduler.config.use_dynamic_shifting:
            raise ConfigError(
                "a scheduler whose shift depends on the size of the image",
                got=f"use_dynamic_shifting of {kind}",
                expected="one shift",
                fix="set use_dynamic_shifting to false, and shift to that of your size",
            )
    elif not hasattr(diffusers_scheduler, "alphas_cumprod"):
        raise ConfigError("no noise in steps", got=kind, expected="a scheduler with betas, as PNDMScheduler")
    return diffusers_scheduler


def squared_error(output: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    """The sum over samples of their mean squared error times their weight, in float32 at least.

    Args:
        output, target: [n, ...].
        weight: [n].
    """
    error = output.to(torch.promote_types(output.dtype, torch.float32)) - target
    return (error.square().flatten(1).mean(1) * weight.to(error.dtype)).sum()
