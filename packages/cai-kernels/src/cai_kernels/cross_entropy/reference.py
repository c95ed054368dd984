"""Cross-entropy in plain torch: what the kernels must give, on any device and in float64 too."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cai_kernels.cross_entropy.options import LossOptions


def widen(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    """Logits in float32 (float64 stays), capped to `softcap * tanh(logits / softcap)` if one is given."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if not softcap else softcap * torch.tanh(wide / softcap)


def reduce(values: torch.Tensor, counted: torch.Tensor, reduction: str) -> torch.Tensor:
    """Values of rows (zero where not counted) reduced: not at all, to their sum, or to the mean of those counted."""
    if reduction == "none":
        return values
    return values.sum() if reduction == "sum" else values.sum() / counted.sum()


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [rows, V], target [rows] -> (loss with the z-loss in it, z-loss), of rows or reduced."""
    wide = widen(logits, softcap)
    counted = target != ignore_index
    loss = F.cross_entropy(
        wide, target, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if not z_loss:
        return loss, torch.zeros_like(loss)
    squares = torch.where(counted, z_loss * torch.logsumexp(wide, -1).square(), 0.0)
    z = reduce(squares, counted, reduction)
    return loss + z, z


def parts(
    logits: torch.Tensor, target: torch.Tensor, vocab_start: int, ignore_index: int, softcap: float | None
) -> tuple[torch.Tensor, ...]:
    """(maximum, sum of exp(logits - maximum), logit of the target or 0, sum of the logits) of rows [rows, columns]."""
    wide = widen(logits, softcap)
    local = target - vocab_start
    counted = target != ignore_index
    is_local = (local >= 0) & (local < wide.shape[-1]) & counted
    aimed = wide.gather(-1, torch.where(is_local, local, 0)[:, None]).squeeze(-1)
    maximum = wide.amax(-1)
    values = (
        maximum,
        (wide - maximum[:, None]).exp().sum(-1),
        torch.where(is_local, aimed, 0.0),
        wide.sum(-1),
    )
    lowest = torch.finfo(wide.dtype).min
    return tuple(torch.where(counted, v, e) for v, e in zip(values, (lowest, 0.0, 0.0, 0.0), strict=True))


def gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: tuple[torch.Tensor, torch.Tensor],
    dloss: torch.Tensor,
    loss: LossOptions,
    *,
    first: int = 0,
    vocabulary: int | None = None,
    entropy: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> torch.Tensor:
    """The gradient of logits [rows, columns].

    Args:
        logits: the columns `first` and following of the vocabulary.
        target: [rows], of the whole vocabulary.
        stats: (maximum, sum of exponentials) of every row over the whole vocabulary.
        dloss: [rows]. A row without an upstream gradient gets zeros, whatever its logits; `loss.ignore_index` is not
            read.
        loss: options of the loss.
        first: class of the first column.
        vocabulary: its size, by default the number of columns.
        entropy: if the entropies have gradients too: (these, sums of exp(x - maximum) * (x - maximum)).
    """
    size, smoothing, z_loss = vocabulary or logits.shape[-1], loss.label_smoothing, loss.z_loss
    softcap = loss.softcap
    wide = widen(logits, softcap)
    maximum, total = (s[:, None] for s in stats)
    dloss = dloss.to(wide.dtype)[:, None]
    p = (wide - maximum).exp() / total
    columns = torch.arange(first, first + wide.shape[-1], device=logits.device)
    g = dloss * (p * (1 + 2 * z_loss * (maximum + total.log())) - smoothing / size)
    g = g - torch.where(columns == target[:, None], dloss * (1 - smoothing), 0.0)
    idle = dloss == 0
    if entropy is not None:
        dentropy, weighted = (e[:, None] for e in entropy)
        g = g - torch.where(p > 0, dentropy * p * (wide - maximum - weighted / total), 0.0)
        idle = idle & (dentropy == 0)
    if softcap:
        g = g * (1 - (wide / softcap).square())
    return torch.where(idle, 0.0, g).to(logits.dtype)
