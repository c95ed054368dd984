"""Column sums of float32 partial results in Triton: the second half of a gradient summed over rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

COLUMNS = 32  # 128 bytes: one sector line a row


@triton.jit
def _column_sums(partial_ptr, out_ptr, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < columns)[None, :]
        total += tl.load(partial_ptr + row.to(tl.int64) * columns + at[None, :], mask=inside, other=0.0)
    tl.store(out_ptr + at, tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=at < columns)


def column_sums(partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """partial [P, D] float32 contiguous -> [D] in `dtype`, always summed in the same order."""
    rows, columns = partial.shape
    if rows == 0 or columns == 0:
        return torch.zeros(columns, dtype=dtype, device=partial.device)
    out = torch.empty(columns, dtype=dtype, device=partial.device)
    launch = _column_sums[(triton.cdiv(columns, COLUMNS),)]  # pyright: ignore[reportIndexIssue]
    launch(partial, out, rows, columns, ROWS=128, COLUMNS=COLUMNS, num_warps=8)
    return out
