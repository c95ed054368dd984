"""The fused form with the logits of all tokens kept, mostly where the weight's gradient will be.

The weight's gradient is one matrix product over all tokens, so it is summed in float32 without a float32 buffer. Until
that product the memory of the gradient holds logits: [tokens, columns] for every slice of the vocabulary, packed to its
end. Slices are then taken in order, and the gradient of a slice is written to its place, where the logits of slices
before it were. What does not fit beside that, the last columns, lies in a buffer of its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.launch import power_of_2
from cai_kernels.linear_cross_entropy import chunked

FROM_BYTES = 64 << 20  # of a weight, below which a float32 sum costs little
SLICE, FEWEST = 8192, 8  # columns of a slice, at most; slices of a vocabulary, at least
ROWS = 2048  # tokens whose gradient is summed in float32 at once, within the L2 cache


@dataclass(frozen=True)
class Plan:
    """`slices` slices of `columns` columns lie in the gradient from value `first` on; the rest in a buffer."""

    columns: int
    slices: int
    first: int


def plan(tokens: int, vocabulary: int, width: int) -> Plan:
    """As many slices as fit: at its turn a slice and all later ones lie behind what is written of the gradient."""
    columns = min(SLICE, max(power_of_2(vocabulary) // (2 * FEWEST), 1))
    place, result, room = tokens * columns, width * columns, vocabulary * width

    def fits(slices: int) -> bool:
        starts = (room - (slices - i) * place for i in range(slices))
        return all(start >= (i + 1) * result for i, start in enumerate(starts))

    slices = next(n for n in range(vocabulary // columns, -1, -1) if n * place <= room and fits(n))
    return Plan(columns, slices, room - slices * place)


def pays(tokens: int, weight: torch.Tensor) -> bool:
    """Whether a large bfloat16 weight's gradient costs less memory this way than with a sum in float32.

    (float16 leaves factors to the backward that a sum rounded to float16 would not survive.)
    """
    size = weight.numel() * weight.element_size()
    if weight.dtype != torch.bfloat16 or size < FROM_BYTES or not tokens:
        return False
    if weight.shape[0] % 8 or weight.shape[1] % 8:  # rows of slices would begin anywhere
        return False
    made = plan(tokens, *weight.shape)
    rest = weight.shape[0] - made.slices * made.columns
    return rest * tokens * weight.element_size() + 4 * ROWS * weight.shape[1] < 2 * size


def loss_and_gradients(
    inputs: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor],
    scale: torch.Tensor,
    out: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    gradients: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    wanted: int,
) -> None:
    """Write the rows' losses and z-losses to out [2, T] and fill the gradients of x, weight (in its dtype) and bias."""
    from cai_kernels.linear_cross_entropy import triton as kernels

    x, weight, bias, target = inputs
    dx, dw, db = gradients
    made = plan(x.shape[0], *weight.shape)
    parts, bounds, rest = _parts(x, weight, dw, made)
    for logits, (start, end) in zip(parts, bounds, strict=True):
        if bias is None:
            torch.mm(x, weight[start:end].t(), out=logits)
        else:
            torch.addmm(bias[start:end], x, weight[start:end].t(), out=logits)
    kernels.loss_and_gradient_kept(dw, rest, made, (target, scale, out), ignore_index, numbers)
    for logits, (start, end) in zip(parts, bounds, strict=True):
        if wanted & chunked.B:
            db[start:end] = logits.sum(0, dtype=db.dtype)
    if wanted & chunked.X:
        _input_gradient(parts, bounds, weight, dx)
    for logits, (start, end) in zip(parts, bounds, strict=True):
        torch.mm(logits.t(), x, out=dw[start:end])


def _parts(x: torch.Tensor, weight: torch.Tensor, dw: torch.Tensor, made: Plan):
    """Logits [T, columns] of every slice and of the rest, their first and last columns, and the rest's buffer."""
    tokens, vocabulary = x.shape[0], weight.shape[0]
    split = made.slices * made.columns
    rest = x.new_empty(tokens, vocabulary - split)
    held = dw.view(-1)[made.first :].view(made.slices, tokens, made.columns)
    bounds = [(i * made.columns, (i + 1) * made.columns) for i in range(made.slices)]
    if split == vocabulary:
        return list(held), bounds, rest
    return [*held, rest], [*bounds, (split, vocabulary)], rest


def _input_gradient(
    parts: list[torch.Tensor], bounds: list[tuple[int, int]], weight: torch.Tensor, dx: torch.Tensor
) -> None:
    total = dx.new_empty(min(ROWS, dx.shape[0]), dx.shape[1], dtype=torch.float32)
    for first in range(0, dx.shape[0], ROWS):
        here = slice(first, first + ROWS)
        some = total[: dx[here].shape[0]]
        for i, (logits, (start, end)) in enumerate(zip(parts, bounds, strict=True)):
            chunked.accumulate(some, logits[here], weight[start:end], fresh=i == 0)
        dx[here] = some
