"""What happens to a chunk of logits [rows, V], in Triton or in plain torch: the same signature in both."""

from __future__ import annotations

import torch

from cai_kernels.cross_entropy import reference

# The auxiliary beside maximum, sum of exponentials and logit of the target.
PLAIN, LOGIT_SUM, ENTROPY = 0, 1, 2


def scan(
    logits: torch.Tensor, target: torch.Tensor, ignore_index: int, softcap: float, aux: int
) -> torch.Tensor:
    """stats [4, rows] in float32 (float64 stays): maximum, sum of exp(x - maximum), logit of the target, auxiliary."""
    target = target.long()
    maximum, total, aimed, logit_sum = reference.parts(logits, target, 0, ignore_index, softcap or None)
    extra = logit_sum if aux == LOGIT_SUM else torch.zeros_like(logit_sum)
    if aux == ENTROPY:
        below = reference.widen(logits, softcap) - maximum[:, None]
        terms = torch.where(below == -float("inf"), 0.0, below.exp() * below).sum(-1)
        extra = torch.where(target == ignore_index, 0.0, terms)
    return torch.stack((maximum, total, aimed, extra))


def losses(
    stats: torch.Tensor, target: torch.Tensor, ignore_index: int, columns: int, numbers: list[float]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(loss, z-loss, entropy) of rows from their stats; the entropy means something if the scan kept it.

    numbers: (label smoothing, z-loss, softcap). Rows ignored give zeros, targets out of range nan.
    """
    maximum, total, aimed, extra = stats.unbind(0)
    smoothing, z_loss, _ = numbers
    logsum = total.log()
    z = z_loss * (maximum + logsum).square()
    loss = logsum + (1 - smoothing) * (maximum - aimed) + z
    if smoothing:
        loss = loss + smoothing * (maximum - extra / columns)
    loss = loss.masked_fill((target < 0) | (target >= columns), float("nan"))
    ignored = target == ignore_index
    return tuple(v.masked_fill(ignored, 0.0) for v in (loss, z, logsum - extra / total))  # type: ignore[return-value]


def write_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
) -> None:
    """Replace the logits by their gradient; upstream [2, rows]: gradients of losses and of entropies."""
    smoothing, z_loss, softcap = numbers
    counted = target != ignore_index
    dloss, dentropy = (torch.where(counted, u, 0.0) for u in upstream.unbind(0))
    entropy = (dentropy, stats[3]) if aux == ENTROPY else None
    vocab, options = (0, logits.shape[-1]), (smoothing, z_loss, softcap or None)
    logits.copy_(
        reference.gradient(logits, target.long(), (stats[0], stats[1]), dloss, vocab, options, entropy)
    )


def loss_and_gradient(
    logits: torch.Tensor,
    target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
) -> None:
    """Write loss and z-loss of the rows to out [2, rows] and replace the logits by `scale` times their gradient."""
    aux = LOGIT_SUM if numbers[0] else PLAIN
    stats = scan(logits, target, ignore_index, numbers[2], aux)
    loss, z, _ = losses(stats, target, ignore_index, logits.shape[-1], numbers)
    out.copy_(torch.stack((loss, z)))
    upstream = torch.stack((scale.expand_as(loss), torch.zeros_like(loss)))
    write_gradient(logits, target, stats, upstream, ignore_index, numbers, aux)


def scale_(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """Multiply in place by a scalar."""
    gradient.mul_(factor)


def scaled(gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient times a scalar, multiplied in float32 (float64 stays), in `dtype`."""
    wide = torch.promote_types(gradient.dtype, torch.float32)
    return (gradient.to(wide) * factor.to(wide)).to(dtype)
