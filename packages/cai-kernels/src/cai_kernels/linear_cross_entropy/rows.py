"""The functions that process a chunk of logits [rows, V], in plain torch; `triton` has the same ones."""

from __future__ import annotations

import torch

from cai_kernels.cross_entropy import reference
from cai_kernels.cross_entropy.options import ENTROPY, LOGIT_SUM, LossOptions


def scan(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, softcap: float, statistic: int
) -> torch.Tensor:
    """stats [4, rows] in float32 (float64 stays): maximum, sum of exp(x - maximum), logit of the target, statistic."""
    target = target.long()
    maximum, total, aimed, logit_sum = reference.parts(logits, target, 0, ignore_index, softcap or None)
    extra = logit_sum if statistic == LOGIT_SUM else torch.zeros_like(logit_sum)
    if statistic == ENTROPY:
        below = reference.widen(logits, softcap) - maximum[:, None]
        terms = torch.where(below == -float("inf"), 0.0, below.exp() * below).sum(-1)
        extra = torch.where(target == ignore_index, 0.0, terms)
    return torch.stack((maximum, total, aimed, extra))


def losses(
    stats: torch.Tensor, target: torch.Tensor, columns: int, loss: LossOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, z-loss, entropy) of rows from their stats; the entropy is only valid if the scan kept ENTROPY.

    Ignored rows give zeros, targets out of range nan.
    """
    maximum, total, aimed, extra = stats.unbind(0)
    smoothing = loss.label_smoothing
    logsum = total.log()
    z = loss.z_loss * (maximum + logsum).square()
    values = logsum + (1 - smoothing) * (maximum - aimed) + z
    if smoothing:
        values = values + smoothing * (maximum - extra / columns)
    values = values.masked_fill((target < 0) | (target >= columns), float("nan"))
    ignored = target == loss.ignore_index
    entropy = logsum - extra / total
    return values.masked_fill(ignored, 0.0), z.masked_fill(ignored, 0.0), entropy.masked_fill(ignored, 0.0)


def write_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    loss: LossOptions,
    statistic: int,
) -> None:
    """Replace the logits by their gradient; upstream [2, rows]: gradients of losses and of entropies."""
    counted = target != loss.ignore_index
    dloss, dentropy = (torch.where(counted, u, 0.0) for u in upstream.unbind(0))
    maximum, total, _, extra = stats.unbind(0)
    entropy = (dentropy, extra) if statistic == ENTROPY else None
    logits.copy_(reference.gradient(logits, target.long(), (maximum, total), dloss, loss, entropy=entropy))


def loss_and_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    loss: LossOptions,
) -> None:
    """Write loss and z-loss of the rows to out [2, rows] and replace the logits by `scale` times their gradient."""
    stats = scan(logits, target, loss.ignore_index, loss.softcap, loss.statistic)
    values, z, _ = losses(stats, target, logits.shape[-1], loss)
    out.copy_(torch.stack((values, z)))
    upstream = torch.stack((scale.expand_as(values), torch.zeros_like(values)))
    write_gradient(logits, target, stats, upstream, loss, loss.statistic)


def scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place by a scalar."""
    gradient.mul_(factor)


def scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient times a scalar, multiplied in float32 (float64 stays), in `dtype`."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(wide)).to(dtype)
