"""Unbiased rounding to bfloat16, with random bits that belong to the element.

Stochastic rounding in training: Gupta et al., arXiv:1502.02551; for bfloat16 weights Zamirai et al.,
arXiv:2010.06192.
"""

from __future__ import annotations

import math

import torch

from cai_mesh import rng
from cai_zero.optimizers.pieces import Part


def round_to_bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round float32 up or down to bfloat16, so that the mean over `random` is the value itself.

    Args:
        values: float32.
        random: int32 of the same shape, uniform in [0, 2**16).

    A bfloat16 is the upper half of a float32: adding 16 random bits to the lower half carries into the upper with
    the right probability. Infinities and NaN stay what they are.
    """
    bits = (values.view(torch.int32) + random) & ~0xFFFF
    return torch.where(values.isfinite(), bits.view(torch.float32), values).to(torch.bfloat16)


def field(bits: torch.Tensor, number: int) -> torch.Tensor:
    """16 of 64 random bits as int32 in [0, 2**16); numbers 0 to 3 are independent."""
    return ((bits >> (16 * number)) & 0xFFFF).to(torch.int32)


def unit(bits: torch.Tensor, number: int) -> torch.Tensor:
    """A float32 in [0, 1) from a field: multiples of 2**-16."""
    return field(bits, number).to(torch.float32) * 2.0**-16


def counters(part: Part, low: int, high: int, out: torch.Tensor) -> None:
    """Write the counter of every element [low, high) of a part's segment, flattened, into `out` int64 [high - low].

    A counter is the element's row-major position in the global parameter plus an offset that its shape decides, so
    every division of the parameter counts alike. Parameters of one shape share their counters.
    """
    out.copy_(positions(part, low, high, out.device)).add_(rng.key("shape", *part.shape))


def positions(part: Part, low: int, high: int, device: torch.device) -> torch.Tensor:
    """Row-major positions in the global parameter of elements [low, high) of a part's segment, int64."""
    first = 0 if part.start is None else part.range[0]
    if not part.layout.sharded_axes:
        return torch.arange(first + low, first + high, device=device)
    numbers = torch.empty(high - low, dtype=torch.int64, device=device)
    stride = [math.prod(part.shape[d + 1 :]) for d in range(len(part.shape))]
    for piece in part.layout.boxes((first + low, first + high)):
        index = torch.zeros((), dtype=torch.int64, device=device)
        for offset, size, step in zip(piece.box.offset, piece.box.shape, stride, strict=True):
            index = index.unsqueeze(-1) + (torch.arange(size, device=device) + offset) * step
        piece.view(numbers).copy_(index)
    return numbers
