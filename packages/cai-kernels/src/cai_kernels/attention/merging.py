"""The merge of two parts of an attention in Triton: each number is read once and written once, in any order of dims."""

from __future__ import annotations

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2
from cai_kernels.ops import define

TILE = 4096  # numbers of a program


@triton.jit
def _place(row, sizes, strides):
    """Offset of row `row` of [batch, heads, queries]."""
    heads, queries = sizes
    outer = row // queries
    return (outer // heads) * strides[0] + (outer % heads) * strides[1] + (row % queries) * strides[2]


@triton.jit
def _merge(ptrs, strides, sizes, rows, width, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """`ROWS` queries a program.

    ptrs: out_a, lse_a, out_b, lse_b, out, lse. strides: of the first three dims of each but the last, whose rows are
    neighbours. sizes: (heads, queries).
    """
    out_a_ptr, lse_a_ptr, out_b_ptr, lse_b_ptr, out_ptr, lse_ptr = ptrs
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    valid = row < rows
    lse_a = tl.load(lse_a_ptr + _place(row, sizes, strides[1]), mask=valid, other=0.0).to(tl.float32)
    lse_b = tl.load(lse_b_ptr + _place(row, sizes, strides[3]), mask=valid, other=0.0).to(tl.float32)
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == -float("inf"), 0.0, top)
    a, b = tl.exp(lse_a - top), tl.exp(lse_b - top)
    total = a + b
    some = tl.where(total == 0.0, 1.0, total)
    at = tl.arange(0, WIDTH)[None, :]
    mask = valid[:, None] & (at < width)
    out_a = tl.load(out_a_ptr + _place(row, sizes, strides[0])[:, None] + at, mask=mask, other=0.0)
    out_b = tl.load(out_b_ptr + _place(row, sizes, strides[2])[:, None] + at, mask=mask, other=0.0)
    out = out_a.to(tl.float32) * (a / some)[:, None] + out_b.to(tl.float32) * (b / some)[:, None]
    place = _place(row, sizes, strides[4])[:, None] + at
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(lse_ptr + row, tl.where(total == 0.0, -float("inf"), top + tl.log(some)), mask=valid)


def _merge_attention(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """outs [B, N, Sq, H] with neighbouring features, lses [B, N, Sq] -> (out in `dtype`, lse in float32)."""
    out, lse = _empty(out_a, lse_a, out_b, lse_b, dtype)
    rows, width = lse.numel(), out.shape[-1]
    if rows and width:
        block = power_of_2(width)
        many = max(TILE // block, 1)
        tensors = (out_a, lse_a, out_b, lse_b, out)
        launch = _merge[(triton.cdiv(rows, many),)]  # pyright: ignore[reportIndexIssue]
        strides = tuple(t.stride()[:3] for t in tensors)
        launch(
            (*tensors, lse), strides, tuple(lse.shape[1:]), rows, width, ROWS=many, WIDTH=block, num_warps=8
        )
    return out, lse


def _empty(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(out_a, dtype=dtype, memory_format=torch.contiguous_format)
    return out, lse_a.new_empty(lse_a.shape, dtype=torch.float32)


merge_attention = define(_merge_attention, _empty)
