"""Column sums of float32 partial results in Triton: the second half of a gradient summed over rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from cai_kernels.launch import power_of_2

ROWS = 128
COLUMNS = 32  # at least: 128 bytes, one sector line a row
VALUES = ROWS * COLUMNS  # of a tile: few rows make a wide one, or programs would be many and all but idle


@triton.jit
def _sums(partial_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < columns)[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64) * columns + at[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=at < columns)


@triton.jit
def _column_sums(partials, outs, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    for i in tl.static_range(len(partials)):
        if tl.program_id(1) == i:
            _sums(partials[i], outs[i], rows, columns, ROWS, COLUMNS)


def column_sums_into(partials: Sequence[torch.Tensor], outs: Sequence[torch.Tensor]) -> None:
    """Fill each of `outs` [D] with the sums over rows of one of `partials` [P, D], in one launch."""
    rows, columns = partials[0].shape
    if rows == 0 or columns == 0:
        for out in outs:
            out.zero_()
        return
    each = min(power_of_2(rows), ROWS)
    block = min(VALUES // each, max(power_of_2(columns), COLUMNS))
    launch = _column_sums[(triton.cdiv(columns, block), len(outs))]  # pyright: ignore[reportIndexIssue]
    launch(tuple(partials), tuple(outs), rows, columns, ROWS=each, COLUMNS=block, num_warps=8)


def column_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial [P, D] float32 contiguous -> [D] in `dtype`, always summed in the same order."""
    out = torch.empty(partial.shape[1], dtype=dtype, device=partial.device)
    column_sums_into((partial,), (out,))
    return out
