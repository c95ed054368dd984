"""Cross-entropy over a vocabulary cut into consecutive parts: what ranks exchange is two numbers a token."""

from __future__ import annotations

from typing import Literal, Protocol

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch.autograd.function import once_differentiable

from cai_mesh.errors import PlanError

WIDE_BYTES = 128 << 20
"""Bytes of the float32 numbers of some rows of logits that exist at once."""


class ColumnMaths(Protocol):
    """A rank's computations on its columns of the logits. Sums and gradients are of float32, or float64 for float64."""

    def scan(
        self, logits: torch.Tensor, target: torch.Tensor, *, vocab_start: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return, of each row of logits [T, columns], its maximum, the sum of exp(x - maximum), and the target's logit.

        Args:
            target: [T], int64, over the whole vocabulary; its logit is 0 where it is not among these columns.
            vocab_start: the first column's place in the vocabulary.
            ignore_index: rows with this target may hold the lowest number and zeros.

        Returns three [T]. No maximum is below the lowest finite number.
        """
        ...

    def gradient(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        maximum: torch.Tensor,
        sum_exp: torch.Tensor,
        dloss: torch.Tensor,
        *,
        vocab_start: int,
    ) -> torch.Tensor:
        """The gradient of the logits, in their shape and dtype: (softmax - one for the target) times `dloss`.

        It may be written over the logits, where nobody reads them later; then their version goes up, so that torch
        refuses a second backward.

        Args:
            maximum, sum_exp: [T], of rows of the whole vocabulary.
            dloss: [T], of the rows' losses; 0 where a row is ignored, whose other numbers then mean nothing.
        """
        ...


class TorchColumns:
    """`ColumnMaths` in plain torch, some rows at a time; one graph, of all rows at once, under torch.compile."""

    def scan(
        self, logits: torch.Tensor, target: torch.Tensor, *, vocab_start: int, ignore_index: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
        tokens, columns = logits.shape
        floor = torch.finfo(dtype).min
        if not columns:
            nothing = logits.new_zeros((tokens,), dtype=dtype)
            return nothing + floor, nothing, nothing.clone()
        top = logits.amax(-1).to(dtype).clamp(min=floor)
        total = torch.empty_like(top)
        for rows in _row_chunks(logits):
            total[rows] = torch.exp_(logits[rows] - top[rows, None]).sum(-1)
        local, outside = _places(target, vocab_start, columns)
        return top, total, logits.gather(1, local[:, None])[:, 0].to(dtype).masked_fill(outside, 0.0)

    def gradient(
        self,
        logits: torch.Tensor,
        target: torch.Tensor,
        maximum: torch.Tensor,
        sum_exp: torch.Tensor,
        dloss: torch.Tensor,
        *,
        vocab_start: int,
    ) -> torch.Tensor:
        out = torch.empty_like(logits)
        if not out.shape[1]:
            return out
        local, outside = _places(target, vocab_start, out.shape[1])
        log_total, hit = torch.log(sum_exp) + maximum, -dloss.masked_fill(outside, 0.0)
        for rows in _row_chunks(logits):
            wide = torch.exp_(logits[rows] - log_total[rows, None]).mul_(dloss[rows, None])
            out[rows] = wide.scatter_add_(1, local[rows, None], hit[rows, None])
        return out


def _places(target: torch.Tensor, start: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each target, 0 for one that lies outside, and which do."""
    outside = (target < start) | (target >= start + columns)
    return (target - start).masked_fill(outside, 0), outside


def _row_chunks(logits: torch.Tensor) -> list[slice]:
    """Rows that are worked on at once: all of them in a compiled graph, which keeps no numbers between operations."""
    rows, columns = logits.shape
    if torch.compiler.is_compiling():
        return [slice(0, rows)]
    step = max(WIDE_BYTES // (4 * max(columns, 1)), 1)
    return [slice(start, start + step) for start in range(0, rows, step)]


class _CrossEntropy(torch.autograd.Function):
    """The loss of every token, by two small all-reduces of [T]; backward keeps the logits and two numbers a token."""

    @staticmethod
    def forward(ctx, logits, target, vocab_start, group_name, ignore_index, maths):
        ctx.maths, ctx.start = maths or TorchColumns(), vocab_start
        local_max, total, aimed = ctx.maths.scan(
            logits, target, vocab_start=vocab_start, ignore_index=ignore_index
        )
        top = _reduce(local_max, "max", group_name)
        sums = torch.stack((total * torch.exp(local_max - top), aimed))
        total, aimed = _reduce(sums, "sum", group_name).unbind(0)
        ignored = target == ignore_index
        ctx.save_for_backward(logits, target, top, total, ignored)
        return (torch.log(total) + top - aimed).masked_fill(ignored, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        logits, target, top, total, ignored = ctx.saved_tensors
        grad = grad.masked_fill(ignored, 0.0)
        logits_grad = ctx.maths.gradient(logits, target, top, total, grad, vocab_start=ctx.start)
        return logits_grad, None, None, None, None, None


def _reduce(x: torch.Tensor, op: str, group_name: str | None) -> torch.Tensor:
    return x if group_name is None else funcol.wait_tensor(funcol.all_reduce(x, op, group_name))


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    vocab_start: int,
    ignore_index: int = -100,
    reduction: Literal["none", "mean", "sum"] = "mean",
    maths: ColumnMaths | None = None,
) -> torch.Tensor:
    """Cross-entropy of logits cut by vocabulary, without gathering them (Megatron-LM, arXiv:1909.08053, section 3).

    Args:
        logits: [T, V/tp], columns `vocab_start` onwards; any float dtype, computed in float32 (float64 stays), some
            rows at a time. They are kept for backward.
        target: [T], int64, over the whole vocabulary, or `ignore_index`. Not checked against the vocabulary.
        group: ranks that hold the other columns (None: all are here).
        reduction: "mean" divides by the number of targets that are not ignored, as `torch.nn.functional` does.
        maths: the computations on a rank's columns, such as kernels; None: plain torch.

    Returns a scalar, or [T] for "none" (0 where ignored).
    """
    if reduction not in ("none", "mean", "sum"):
        raise PlanError("unknown reduction of a loss", got=reduction, expected="none, mean or sum")
    name = group.group_name if group is not None else None
    losses = _CrossEntropy.apply(logits, target, vocab_start, name, ignore_index, maths)
    assert isinstance(losses, torch.Tensor)
    if reduction == "none":
        return losses
    if reduction == "sum":
        return losses.sum()
    return losses.sum() / (target != ignore_index).sum()
