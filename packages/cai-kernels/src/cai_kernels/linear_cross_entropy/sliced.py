"""The fused form for all tokens at once, in slices of the vocabulary, with the logits in the gradient's memory.

The gradient of the weight is then one matrix product over all tokens, summed in float32 without a float32 buffer.
Until that product the memory of the gradient holds logits: [tokens, columns] of every slice, packed to its end. The
gradients of the slices are then computed in order, each written over the logits of earlier slices. Logits that do not
fit, those of the last columns, lie in a buffer of their own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.linear_cross_entropy import slice_plan
from cai_kernels.linear_cross_entropy.options import Needed
from cai_kernels.linear_cross_entropy.products import accumulate
from cai_kernels.linear_cross_entropy.slice_plan import SlicePlan, plan_slices


@dataclass(frozen=True)
class _Slice:
    """Logits [T, columns] of the columns `start` to `end` of the vocabulary."""

    logits: torch.Tensor
    start: int
    end: int


def loss_and_gradients(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    scale: torch.Tensor,
    out: torch.Tensor,
    loss: LossOptions,
    needed: Needed,
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> None:
    """Write the rows' losses and z-losses to out [2, T] and fill the gradients of x, weight (in its dtype) and bias."""
    from cai_kernels.linear_cross_entropy import triton as kernels

    dx, dw, db = gradients
    plan = plan_slices(x.shape[0], *weight.shape)
    slices, buffer = _slices(x, weight, dw, plan)
    for part in slices:
        columns = weight[part.start : part.end].t()
        if bias is None:
            torch.mm(x, columns, out=part.logits)
        else:
            torch.addmm(bias[part.start : part.end], x, columns, out=part.logits)
    kernels.loss_and_gradient_sliced(dw, buffer, plan, target, scale, out, loss)
    if needed.bias:
        for part in slices:
            db[part.start : part.end] = part.logits.sum(0, dtype=db.dtype)
    if needed.x:
        _input_gradient(slices, weight, dx)
    for part in slices:
        torch.mm(part.logits.t(), x, out=dw[part.start : part.end])


def _slices(
    x: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor, plan: SlicePlan
) -> tuple[list[_Slice], torch.Tensor]:
    """All slices, the last in a buffer unless the others are all, and that buffer."""
    tokens, vocabulary = x.shape[0], weight.shape[0]
    split = plan.slices * plan.columns
    buffer = x.new_empty(tokens, vocabulary - split)
    slice_logits = dw.view(-1)[plan.first :].view(plan.slices, tokens, plan.columns)
    slices = [
        _Slice(logits, i * plan.columns, (i + 1) * plan.columns)
        for i, logits in enumerate(slice_logits.unbind())
    ]
    if split < vocabulary:
        slices.append(_Slice(buffer, split, vocabulary))
    return slices, buffer


def _input_gradient(slices: list[_Slice], weight: torch.Tensor, dx: torch.Tensor) -> None:
    rows = slice_plan.ROWS
    total = dx.new_empty(min(rows, dx.shape[0]), dx.shape[1], dtype=torch.float32)
    for first in range(0, dx.shape[0], rows):
        chunk = slice(first, first + rows)
        part_total = total[: dx[chunk].shape[0]]
        for i, part in enumerate(slices):
            accumulate(part_total, part.logits[chunk], weight[part.start : part.end], overwrite=i == 0)
        dx[chunk] = part_total
