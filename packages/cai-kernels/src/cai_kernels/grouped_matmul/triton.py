"""Grouped matmul in Triton: every program finds its expert from the offsets, so the host never waits for them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from cai_kernels.compiler import tl, triton
from cai_kernels.grouped_matmul.operators import differentiable
from cai_kernels.launch import dot_precision, power_of_2, waves
from cai_kernels.tiles import dot

GROUP = 8  # row tiles that share the columns in L2 before the next columns


class Tensors(NamedTuple):
    """The tensors that the kernels read and write: lhs [T, inner], rhs, out, offsets [E + 1]."""

    lhs: object
    rhs: object
    out: object
    offsets: object


class Sizes(NamedTuple):
    """T, the two other sizes of the product, E, the stride of lhs's rows and those of [E, D, F].

    Flat: in a tuple of a tuple, after a branch or in a loop, Triton 3.6 takes a one for None if the outer has one too.
    """

    rows: int
    inner: int
    columns: int
    experts: int
    lhs_row: int
    expert: int
    deep: int
    across: int


class Blocks(NamedTuple):
    """Tile of the result and depth of a step."""

    rows: int
    columns: int
    inner: int


@triton.jit
def _find(offsets_ptr, tile, sizes, BLOCK: tl.constexpr, EXPERTS: tl.constexpr):
    """(expert, first row, end of its rows) of a row tile; expert E is the tail, more than E is past the last tile."""
    expert = tl.arange(0, EXPERTS)
    first = tl.load(offsets_ptr + expert, mask=expert <= sizes.experts, other=sizes.rows)
    end = tl.load(offsets_ptr + expert + 1, mask=expert < sizes.experts, other=sizes.rows)
    tiles = tl.where(expert <= sizes.experts, (end - first + BLOCK - 1) // BLOCK, 0)
    upto = tl.cumsum(tiles, 0)
    group = tl.sum((upto <= tile).to(tl.int32), 0)
    mine = expert == group
    within = tile - tl.sum(tl.where(mine, upto - tiles, 0), 0)
    return group, tl.sum(tl.where(mine, first, 0), 0) + within * BLOCK, tl.sum(tl.where(mine, end, 0), 0)


@triton.jit
def _multiply(
    tensors,
    sizes,
    row_tiles,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
    EXPERTS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile of out [T, columns] = lhs [T, inner] @ rhs [E, inner, columns]; the tail is zeros."""
    ROWS: tl.constexpr = BLOCKS.rows
    COLUMNS: tl.constexpr = BLOCKS.columns
    INNER: tl.constexpr = BLOCKS.inner
    program = tl.program_id(0)
    column_tiles = tl.cdiv(sizes.columns, COLUMNS)
    band = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - band, GROUP)
    tile = band + program % (GROUP * column_tiles) % height
    column = program % (GROUP * column_tiles) // height * COLUMNS + tl.arange(0, COLUMNS)
    expert, first, end = _find(tensors.offsets, tile, sizes, ROWS, EXPERTS)
    if expert <= sizes.experts:
        row = first + tl.arange(0, ROWS)
        inside = (row < end)[:, None]
        step = tl.arange(0, INNER)
        lhs = tensors.lhs + row.to(tl.int64)[:, None] * sizes.lhs_row + step[None, :]
        rhs = tensors.rhs + expert.to(tl.int64) * sizes.expert
        rhs += step[:, None] * sizes.deep + column[None, :] * sizes.across
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        depth = tl.where(expert < sizes.experts, sizes.inner, 0)
        for at in range(0, depth, INNER):
            a = tl.load(lhs, mask=inside & (at + step < sizes.inner)[None, :], other=0.0)
            b = tl.load(
                rhs, mask=(at + step < sizes.inner)[:, None] & (column < sizes.columns)[None, :], other=0.0
            )
            total = dot(a, b, total, PRECISION)
            lhs += INNER
            rhs += INNER * sizes.deep
        out = tensors.out + row.to(tl.int64)[:, None] * sizes.columns + column[None, :]
        tl.store(out, total.to(out.dtype.element_ty), mask=inside & (column < sizes.columns)[None, :])


@triton.jit
def _multiply_transposed(tensors, sizes, BLOCKS: tl.constexpr, PRECISION: tl.constexpr):
    """One tile of out [E, inner, columns] = lhs[rows of e].T @ rhs[rows of e]; rhs is [T, columns]."""
    ROWS: tl.constexpr = BLOCKS.rows
    COLUMNS: tl.constexpr = BLOCKS.columns
    INNER: tl.constexpr = BLOCKS.inner
    expert = tl.program_id(1)
    column_tiles = tl.cdiv(sizes.columns, COLUMNS)
    across = tl.program_id(0) // column_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) % column_tiles * COLUMNS + tl.arange(0, COLUMNS)
    first = tl.load(tensors.offsets + expert)
    end = tl.load(tensors.offsets + expert + 1)
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    step = first + tl.arange(0, INNER)
    lhs = tensors.lhs + step.to(tl.int64)[:, None] * sizes.lhs_row + across[None, :]
    rhs = tensors.rhs + step.to(tl.int64)[:, None] * sizes.columns + column[None, :]
    for at in range(first, end, INNER):
        inside = (at + tl.arange(0, INNER) < end)[:, None]
        a = tl.load(lhs, mask=inside & (across < sizes.inner)[None, :], other=0.0)
        b = tl.load(rhs, mask=inside & (column < sizes.columns)[None, :], other=0.0)
        total = dot(tl.trans(a), b, total, PRECISION)
        lhs += INNER * sizes.lhs_row
        rhs += INNER * sizes.columns
    out = tensors.out + expert.to(tl.int64) * sizes.expert
    out += across.to(tl.int64)[:, None] * sizes.deep + column.to(tl.int64)[None, :] * sizes.across
    mask = (across < sizes.inner)[:, None] & (column < sizes.columns)[None, :]
    tl.store(out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _clear_tail(out_ptr, offsets_ptr, rows, columns, experts, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    routed_rows = tl.load(offsets_ptr + experts).to(tl.int64)
    for row in range(routed_rows + tl.program_id(0), rows, tl.num_programs(0)):
        for first in range(0, columns, BLOCK):
            zeros = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
            tl.store(out_ptr + row * columns + first + at, zeros, mask=first + at < columns)


@triton.jit
def _clear_empty(out_ptr, offsets_ptr, size, BLOCK: tl.constexpr):
    expert = tl.program_id(0)
    if tl.load(offsets_ptr + expert) == tl.load(offsets_ptr + expert + 1):
        at = tl.arange(0, BLOCK)
        zeros = tl.zeros((BLOCK,), dtype=out_ptr.dtype.element_ty)
        for first in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
            tl.store(out_ptr + expert.to(tl.int64) * size + first + at, zeros, mask=first + at < size)


def clear_tail(out: torch.Tensor, offsets: torch.Tensor) -> None:
    """Set the rows of out [T, F] from offsets[E] on to zero, without waiting for the offsets."""
    rows, columns = out.shape
    launch = _clear_tail[(waves(out.device),)]  # pyright: ignore[reportIndexIssue]
    launch(out, offsets, rows, columns, offsets.shape[0] - 1, BLOCK=1024)


def clear_empty(matrices: torch.Tensor, offsets: torch.Tensor) -> None:
    """Set matrices [E, D, F] (contiguous) of experts without rows to zero, without waiting for the offsets."""
    launch = _clear_empty[(matrices.shape[0], 16)]  # pyright: ignore[reportIndexIssue]
    launch(matrices, offsets, matrices.stride(0), BLOCK=1024)


def _rows_contiguous(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.stride(1) == 1 else matrix.contiguous()


def tile(rows_each: int, columns: int, dtype: torch.dtype) -> tuple[Blocks, int, int]:
    """(blocks, warps, stages) of a product: as tall as the groups are on average, no wider than the result."""
    if dtype == torch.float32:
        return Blocks(64, 64, 32), 4, 3
    tall = 128 if rows_each > 64 else 64 if rows_each > 32 else 32
    wide = 256 if columns >= 256 and tall == 128 else 128 if columns > 64 else 64
    return Blocks(tall, wide, 64), 8 if tall * wide > 16384 else 4, 3


def _grouped_matmul(x: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [T, D], weight [E, D, F], offsets [E + 1] -> [T, F]."""
    out = x.new_empty(x.shape[0], weight.shape[2])
    if out.numel() == 0:
        return out
    x, offsets = _rows_contiguous(x), offsets.contiguous()
    (rows, inner), (experts, _, columns) = x.shape, weight.shape
    blocks, warps, stages = tile(rows // max(experts, 1), columns, x.dtype)
    row_tiles = rows // blocks.rows + experts + 1
    launch = _multiply[(row_tiles * triton.cdiv(columns, blocks.columns),)]  # pyright: ignore[reportIndexIssue]
    launch(
        Tensors(x, weight, out, offsets),
        Sizes(rows, inner, columns, experts, x.stride(0), *weight.stride()),
        row_tiles, BLOCKS=blocks, GROUP=GROUP, EXPERTS=power_of_2(experts + 2),
        PRECISION=dot_precision(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return out


def _grouped_matmul_weight(
    x: torch.Tensor, dout: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    """The gradient of weight, `x[rows of e].T @ dout[rows of e]`, summed in float32, in the strides of weight."""
    dweight = torch.empty_like(weight)
    if dweight.numel() == 0:
        return dweight
    x, dout, offsets = _rows_contiguous(x), dout.contiguous(), offsets.contiguous()
    (rows, inner), columns, experts = x.shape, dout.shape[1], weight.shape[0]
    blocks, warps, stages = tile(inner, columns, x.dtype)
    tiles = triton.cdiv(inner, blocks.rows) * triton.cdiv(columns, blocks.columns)
    launch = _multiply_transposed[(tiles, experts)]  # pyright: ignore[reportIndexIssue]
    launch(
        Tensors(x, dout, dweight, offsets),
        Sizes(rows, inner, columns, experts, x.stride(0), *dweight.stride()),
        BLOCKS=blocks, PRECISION=dot_precision(x.dtype), num_warps=warps, num_stages=stages,
    )  # fmt: skip
    return dweight


grouped_matmul, grouped_matmul_weight = differentiable(_grouped_matmul, _grouped_matmul_weight)
