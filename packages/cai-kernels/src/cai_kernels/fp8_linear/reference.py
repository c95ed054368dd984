"""FP8 casts and products in plain torch. GPU casts give the same bits, GPU products the same up to rounding.

A scale is the largest magnitude it covers divided by the largest number of the type (1 where all is zero), so nothing
saturates. Products of the stored numbers are summed in float32.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn import functional as F

TENSOR, ROW, BLOCK, SQUARE = 0, 1, 2, 3  # one scale in all; a row; 1x128; 128x128
SIDE = 128


class Cast(NamedTuple):
    """A matrix [M, K] in FP8, and transposed [K, M rounded up to 16] in FP8, each with its scales.

    Scales are float32: [1, 1] (TENSOR), [M, 1] (ROW), [M, K / 128] (BLOCK), [M / 128, K / 128] (SQUARE); likewise of
    the transposed matrix. If only one form was asked for, `transposed` and its scales have no elements.
    """

    matrix: torch.Tensor
    scale: torch.Tensor
    transposed: torch.Tensor
    transposed_scale: torch.Tensor


def _tiles(t: torch.Tensor, scaling: int) -> tuple[torch.Tensor, tuple[int, ...]]:
    """t [M, K] grouped by scale, and the dims of a group."""
    rows, columns = t.shape
    if scaling in (TENSOR, ROW):
        return t, ((0, 1) if scaling == TENSOR else (1,))
    down = SIDE if scaling == SQUARE else 1
    padded = F.pad(t, (0, -columns % SIDE, 0, -rows % down))
    grouped = padded.view(padded.shape[0] // down, down, padded.shape[1] // SIDE, SIDE)
    return grouped, (1, 3)


def _cast(t: torch.Tensor, scaling: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = t.float()
    tiles, dims = _tiles(wide, scaling)
    largest = tiles.abs().amax(dims, keepdim=True)
    limit = torch.full_like(largest, torch.finfo(dtype).max)  # a number would be multiplied by a reciprocal
    divisor = torch.where(largest == 0, limit, largest)
    q, scale = tiles * (limit / divisor), divisor / limit
    if scaling in (TENSOR, ROW):
        return q.to(dtype), scale
    codes = q.flatten(2).flatten(0, 1)[: t.shape[0], : t.shape[1]]
    return codes.contiguous().to(dtype), scale.squeeze(3).squeeze(1)


def cast(t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool) -> Cast:
    """t [M, K] in `dtype`; with `transposed` also its transpose."""
    if not t.numel():
        return empty_cast(t, scaling, dtype, transposed)
    q, scale = _cast(t, scaling, dtype)
    if not transposed:
        return Cast(q, scale, q.new_empty(0), scale.new_empty(0))
    turned, turned_scale = _cast(t.t().contiguous(), scaling, dtype)
    turned = F.pad(turned.view(torch.uint8), (0, -t.shape[0] % 16)).view(dtype)
    return Cast(q, scale, turned, turned_scale)


def scale_shape(rows: int, columns: int, scaling: int) -> tuple[int, int]:
    """The shape of the scales of [rows, columns]."""
    across = -(-columns // SIDE)
    shapes = {TENSOR: (1, 1), ROW: (rows, 1), BLOCK: (rows, across), SQUARE: (-(-rows // SIDE), across)}
    return shapes[scaling]


def empty_cast(t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool) -> Cast:
    """Tensors of the shapes `cast` returns; those of an empty t are filled: nothing, and scales of 1."""
    rows, columns = t.shape
    q = t.new_empty((rows, columns), dtype=dtype)
    scale = t.new_ones(scale_shape(rows, columns, scaling), dtype=torch.float32)
    if not transposed:
        return Cast(q, scale, q.new_empty(0), scale.new_empty(0))
    turned = t.new_empty((columns, rows + -rows % 16), dtype=dtype)
    turned_scale = t.new_ones(scale_shape(columns, rows, scaling), dtype=torch.float32)
    return Cast(q, scale, turned, turned_scale)


def widen(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """The float32 values of q [M, K] and its scales."""
    rows, columns = q.shape
    if scale.shape[0] not in (1, rows) or (scale.shape[0] == 1 and rows > 1 and scale.shape[1] > 1):
        scale = scale.repeat_interleave(SIDE, 0)[:rows]
    if scale.shape[1] > 1:
        scale = scale.repeat_interleave(SIDE, 1)[:, :columns]
    return q.float() * scale


def matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] @ b [N, K]ᵀ, scales applied, in `dtype`."""
    with torch.autocast(a.device.type, enabled=False):  # which would multiply in 16 bits
        return (widen(a, a_scale) @ widen(b, b_scale).t()).to(dtype)
