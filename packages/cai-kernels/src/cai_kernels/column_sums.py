"""Column sums of float32 partial results in Triton: the second step of a gradient summed over rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import pdl_options, power_of_2
from cai_kernels.tiles import wait_for_previous

ROWS = 512  # all that a persistent launch left on a GPU, read at once: what it takes is the time of one such read
COLUMNS = 16  # at least: 64 bytes, two sectors a row
PROGRAMS = 128  # at least, as long as columns last
VALUES = 32768  # of a tile, at most


@triton.jit
def _tile(partial_ptr, first, at, rows, columns, ROWS: tl.constexpr):
    row = first + tl.arange(0, ROWS)[:, None]
    inside = (row < rows) & (at < columns)[None, :]
    return tl.load(partial_ptr + row.to(tl.int64) * columns + at[None, :], mask=inside, other=0.0)


@triton.jit
def _sums(partial_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = _tile(partial_ptr, 0, at, rows, columns, ROWS)  # added to nothing, its loads wait for no sum
    for first in range(ROWS, rows, ROWS):
        total += _tile(partial_ptr, first, at, rows, columns, ROWS)
    tl.store(out_ptr + at, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _column_sums(partials, outs, rows, columns, PDL: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    wait_for_previous(PDL)
    for i in tl.static_range(len(partials)):
        if tl.program_id(1) == i:
            _sums(partials[i], outs[i], rows, columns, ROWS, COLUMNS)


def column_sums_into(partials: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Fill each of `outs` [D] with the sums over rows of one of `partials` [P, D], in one launch."""
    device, (rows, columns) = partials[0].device, partials[0].shape
    if rows == 0 or columns == 0:
        for out in outs:
            out.zero_()
        return
    tile_rows = min(power_of_2(rows), ROWS)
    block = min(VALUES // tile_rows, max(power_of_2(triton.cdiv(columns, PROGRAMS)), COLUMNS))
    warps = min(max(tile_rows * block // 512, 4), 16)
    launch = _column_sums[(triton.cdiv(columns, block), len(outs))]  # pyright: ignore[reportIndexIssue]
    options = {"ROWS": tile_rows, "COLUMNS": block, "num_warps": warps, **pdl_options(device)}
    launch(tuple(partials), tuple(outs), rows, columns, **options)


def column_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial [P, D] float32 contiguous -> [D] in `dtype`, always summed in the same order."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    column_sums_into((partial,), (out,))
    return out
