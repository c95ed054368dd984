"""The slices of the logits that fit into the memory of the weight's gradient; see `sliced`."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_kernels.launch import power_of_2

MIN_WEIGHT_BYTES = 64 << 20  # below this size a float32 sum costs little memory
MAX_COLUMNS, MIN_SLICES = 8192, 8  # columns of a slice, at most; slices of a vocabulary, at least
ROWS = 2048  # tokens whose gradient is summed in float32 at once, within the L2 cache


@dataclass(frozen=True)
class SlicePlan:
    """The logits that lie in the gradient of the weight; the columns after them lie in a buffer.

    Args:
        columns: columns of a slice.
        slices: number of slices that lie in the gradient.
        first: index of the element of the gradient at which the first slice begins.
    """

    columns: int
    slices: int
    first: int


def plan_slices(tokens: int, vocabulary: int, width: int) -> SlicePlan:
    """As many slices as fit.

    The gradients of the slices are written in order, from the beginning of the memory. When a slice's gradient is
    written, the logits of this slice and of all later ones must lie after its end.
    """
    columns = min(MAX_COLUMNS, max(power_of_2(vocabulary) // (2 * MIN_SLICES), 1))
    logits, gradient, memory = tokens * columns, width * columns, vocabulary * width

    def fits(slices: int) -> bool:
        starts = (memory - (slices - i) * logits for i in range(slices))
        return all(start >= (i + 1) * gradient for i, start in enumerate(starts))

    slices = next(n for n in range(vocabulary // columns, -1, -1) if n * logits <= memory and fits(n))
    return SlicePlan(columns, slices, memory - slices * logits)


def saves_memory(tokens: int, weight: torch.Tensor) -> bool:
    """Whether the gradient of a large bfloat16 weight takes less memory in slices than with a sum in float32.

    Not for float16: its gradients are scaled in backward, after they were rounded to float16, and would underflow.
    """
    size = weight.numel() * weight.element_size()
    if weight.dtype != torch.bfloat16 or size < MIN_WEIGHT_BYTES or not tokens:
        return False
    if weight.shape[0] % 8 or weight.shape[1] % 8:  # rows of slices would not be aligned to 16 bytes
        return False
    plan = plan_slices(tokens, *weight.shape)
    buffered = weight.shape[0] - plan.slices * plan.columns
    return buffered * tokens * weight.element_size() + 4 * ROWS * weight.shape[1] < 2 * size
