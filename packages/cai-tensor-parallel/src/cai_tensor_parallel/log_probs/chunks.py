"""The mathematics of log-probabilities on a rank's columns of some rows of logits: plain tensors, no rank.

Of a row with logits l, maximum m and z = sum exp(l - m) over the whole vocabulary:

    log p = l - m - log z        entropy = log z - sum exp(l - m) (l - m) / z
"""

from __future__ import annotations

from typing import Protocol

import torch


class ChunkMaths(Protocol):
    """A rank's computations on its columns of a chunk of logits, in float32, or float64 for float64."""

    def scan(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        *,
        first: int,
        ignore_index: int,
        softcap: float | None,
        entropy: bool,
    ) -> torch.Tensor:
        """Return of each row its maximum m, z = sum exp(l - m), the target's logit, and sum exp(l - m) (l - m).

        Args:
            logits: [rows, columns]; they may be written over.
            target: [rows], int64, over the whole vocabulary; its logit is 0 where it is not among these columns.
            first: the first column's place in the vocabulary.
            ignore_index: the target of rows that may hold the lowest number and zeros.
            softcap: the cap c of logits, l = c tanh(logits / c); None: they stay.
            entropy: whether the fourth number is wanted; else it is 0.

        Returns [4, rows]. No maximum is below the lowest finite number.
        """
        ...

    def write_gradient(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        stats: torch.Tensor,
        upstream: torch.Tensor,
        *,
        first: int,
        softcap: float | None,
    ) -> None:
        """Replace logits [rows, columns] by their gradient.

        Args:
            target, first, softcap: as in `scan`.
            stats: [3, rows], of rows of the whole vocabulary: m, z and the entropy.
            upstream: [1, rows] or [2, rows]: the gradient of the target's log-probability, and that of the entropy; 0
                where a row is ignored, whose other numbers then mean nothing.
        """
        ...


class TorchChunks:
    """`ChunkMaths` in plain torch."""

    def scan(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        *,
        first: int,
        ignore_index: int,
        softcap: float | None,
        entropy: bool,
    ) -> torch.Tensor:
        wide = _wide(logits, softcap)
        rows, columns = wide.shape
        lowest = torch.finfo(wide.dtype).min
        if not columns:
            nothing = wide.new_zeros(rows)
            return torch.stack((nothing + lowest, nothing, nothing, nothing))
        local, outside = _places(target, first, columns)
        aimed = wide.gather(1, local[:, None])[:, 0].masked_fill(outside, 0.0)
        maximum = wide.amax(-1).clamp(min=lowest)
        below = wide - maximum[:, None]
        weights = below.exp()
        total = weights.sum(-1)
        moment = _times(weights, below).sum(-1) if entropy else torch.zeros_like(total)
        return torch.stack((maximum, total, aimed, moment))

    def write_gradient(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        stats: torch.Tensor,
        upstream: torch.Tensor,
        *,
        first: int,
        softcap: float | None,
    ) -> None:
        if not logits.shape[1]:
            return
        wide = _wide(logits, softcap)
        maximum, total, entropy = stats[..., None].unbind(0)
        logs = wide - (maximum + total.log())
        probs = logs.exp()
        gradient = -upstream[0, :, None] * probs
        if len(upstream) == 2:
            gradient -= upstream[1, :, None] * _times(probs, logs + entropy)
        local, outside = _places(target, first, logits.shape[1])
        gradient.scatter_add_(1, local[:, None], upstream[0].masked_fill(outside, 0.0)[:, None])
        if softcap is not None:
            gradient *= 1 - (wide / softcap).square()
        logits.copy_(gradient)


def merged(stats: torch.Tensor, maximum: torch.Tensor) -> torch.Tensor:
    """What ranks add up: z, the target's logit and the moment of `ChunkMaths.scan`, for another maximum.

    Args:
        stats: [4, T], of a rank's columns.
        maximum: [T], over all columns.

    Returns [3, T].
    """
    local_maximum, total, aimed, moment = stats.unbind(0)
    shift = local_maximum - maximum
    scale = shift.exp()
    return torch.stack((total * scale, aimed, _times(scale, moment + _times(total, shift))))


def chunk_size(columns: int, width: int, limit: int) -> int:
    """Return the number of places in a chunk: as many as keep its logits, of `width` bytes each, within `limit`."""
    return max(limit // (max(columns, 1) * width), 1)


def _times(weight: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """The product, 0 where the weight is: of a logit of minus infinity too."""
    return torch.where(weight == 0, 0.0, weight * value)


def _wide(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if softcap is None else softcap * torch.tanh(wide / softcap)


def _places(target: torch.Tensor, first: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target, 0 for one that lies outside, and which do."""
    outside = (target < first) | (target >= first + columns)
    return (target - first).masked_fill(outside, 0), outside
