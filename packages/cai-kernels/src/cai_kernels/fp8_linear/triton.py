"""FP8 casts that read their input once (block scales) or twice, and the product of block-scaled matrices."""

from __future__ import annotations

import os

import torch

from cai_kernels.compiler import TensorDescriptor, tl, triton
from cai_kernels.fp8_linear.reference import BLOCK, ROW, SIDE, SQUARE, TENSOR, Cast, empty_cast

_TENSOR, _ROW, _BLOCK = tl.constexpr(TENSOR), tl.constexpr(ROW), tl.constexpr(BLOCK)
_SIDE = tl.constexpr(SIDE)


@triton.jit
def _largest(
    t_ptr, rows_ptr, columns_ptr, shape, SCALING: tl.constexpr, TURNED: tl.constexpr, SIZE: tl.constexpr
):
    """Largest magnitudes as the bits of a float32: as integers they have the same order, so the maximum is exact."""
    rows, columns = shape
    across = tl.cdiv(columns, SIZE)
    program = tl.program_id(0).to(tl.int64)
    row = (program // across) * SIZE + tl.arange(0, SIZE)
    column = (program % across) * SIZE + tl.arange(0, SIZE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    t = tl.abs(
        tl.load(t_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    )
    down = tl.max(t, 1)
    if SCALING == _TENSOR:
        tl.atomic_max(rows_ptr, tl.max(down, 0).to(tl.int32, bitcast=True), sem="relaxed")
    else:
        tl.atomic_max(rows_ptr + row, down.to(tl.int32, bitcast=True), mask=row < rows, sem="relaxed")
        if TURNED:
            bits = tl.max(t, 0).to(tl.int32, bitcast=True)
            tl.atomic_max(columns_ptr + column, bits, mask=column < columns, sem="relaxed")


@triton.jit
def _factors(largest, limit):
    """(the factor of the numbers, the scale that undoes it); `limit` is the largest number of the FP8 type."""
    divisor = tl.where(largest == 0.0, limit, largest)
    return tl.div_rn(limit + tl.zeros_like(divisor), divisor), tl.div_rn(
        divisor, limit + tl.zeros_like(divisor)
    )


@triton.jit
def _to(value, dtype: tl.constexpr, ON_CPU: tl.constexpr):
    """A cast to float8. The interpreter's drops the carry of a rounding, so there numbers are rounded before it."""
    if ON_CPU:
        SHIFT: tl.constexpr = 20 if dtype == tl.float8e4nv else 21
        bits = value.to(tl.int32, bitcast=True)
        even = (bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)) & (-1 << SHIFT)
        # below the smallest normal number steps are equal: adding a large one rounds to them
        MAGIC: tl.constexpr = 24576.0 if dtype == tl.float8e4nv else 192.0
        SMALL: tl.constexpr = 0.015625 if dtype == tl.float8e4nv else 0.00006103515625
        value = tl.where(tl.abs(value) < SMALL, (value + MAGIC) - MAGIC, even.to(tl.float32, bitcast=True))
    return value.to(dtype)


@triton.jit
def _store_turned(q_ptr, tile, row, column, columns, padded, ON_CPU: tl.constexpr):
    """Cast `tile` and store it transposed.

    Its numbers are products of their own even where they equal those stored directly, with a factor `one` that is 1.0,
    which compilers cannot know. For a pair of float8 that is packed for one store and split into bytes for another, the
    ptxas of CUDA 12.8 and 12.9 takes bytes from a register that does not hold the pair (13.4 is right).
    """
    place = q_ptr + column[:, None] * padded + row[None, :]
    mask = (column[:, None] < columns) & (row[None, :] < padded)
    tl.store(place, tl.trans(_to(tile, q_ptr.dtype.element_ty, ON_CPU)), mask=mask)


@triton.jit
def _cast(
    t_ptr, q_ptrs, scale_ptrs, largest_ptrs, shape, limits,
    SCALING: tl.constexpr, TURNED: tl.constexpr, SIZE: tl.constexpr, ON_CPU: tl.constexpr,
):  # fmt: skip
    """One tile a program; shape: (rows, columns, columns of the transposed); limits: (float8's largest, `one`)."""
    rows, columns, padded = shape
    limit, one = limits
    q_ptr, turned_ptr = q_ptrs
    scale_ptr, turned_scale_ptr = scale_ptrs
    row_largest_ptr, column_largest_ptr = largest_ptrs
    across = tl.cdiv(columns, SIZE)
    program = tl.program_id(0).to(tl.int64)
    block_row, block_column = program // across, program % across
    row = block_row * SIZE + tl.arange(0, SIZE)
    column = block_column * SIZE + tl.arange(0, SIZE)
    inside = (row[:, None] < rows) & (column[None, :] < columns)
    t = tl.load(t_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALING == _TENSOR:
        factor, scale = _factors(tl.load(row_largest_ptr).to(tl.float32, bitcast=True), limit)
        tl.store(scale_ptr, scale, mask=program == 0)
        if TURNED:
            tl.store(turned_scale_ptr, scale, mask=program == 0)
        q = t * factor
        turned = t * (factor * one)
    elif SCALING == _ROW:
        bits = tl.load(row_largest_ptr + row, mask=row < rows, other=0)
        factor, scale = _factors(bits.to(tl.float32, bitcast=True), limit)
        tl.store(scale_ptr + row, scale, mask=row < tl.where(block_column == 0, rows, 0))
        q = t * factor[:, None]
        turned = q
        if TURNED:
            bits = tl.load(column_largest_ptr + column, mask=column < columns, other=0)
            factor, scale = _factors(bits.to(tl.float32, bitcast=True), limit)
            tl.store(turned_scale_ptr + column, scale, mask=column < tl.where(block_row == 0, columns, 0))
            turned = t * factor[None, :]
    elif SCALING == _BLOCK:
        factor, scale = _factors(tl.max(tl.abs(t), 1), limit)
        tl.store(scale_ptr + row * across + block_column, scale, mask=row < rows)
        q = t * factor[:, None]
        turned = q
        if TURNED:
            factor, scale = _factors(tl.max(tl.abs(t), 0), limit)
            tl.store(
                turned_scale_ptr + column * tl.cdiv(rows, SIZE) + block_row, scale, mask=column < columns
            )
            turned = t * factor[None, :]
    else:
        factor, scale = _factors(tl.max(tl.max(tl.abs(t), 1), 0), limit)
        tl.store(scale_ptr + block_row * across + block_column, scale)
        if TURNED:
            tl.store(turned_scale_ptr + block_column * tl.cdiv(rows, SIZE) + block_row, scale)
        q = t * factor
        turned = t * (factor * one)
    place = q_ptr + row[:, None] * columns + column[None, :]
    tl.store(place, _to(q, q_ptr.dtype.element_ty, ON_CPU), mask=inside)
    if TURNED:
        _store_turned(turned_ptr, turned, row, column, columns, padded, ON_CPU)


@triton.jit
def _tile_of(m, n, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr):
    """First row and column of a program's tile, in strips of GROUP rows, so that concurrent programs share operands."""
    down, across = tl.cdiv(m, ROWS), tl.cdiv(n, COLUMNS)
    program = tl.program_id(0)
    strip = program // (GROUP * across)
    high = tl.minimum(down - strip * GROUP, GROUP)
    inner = program % (GROUP * across)
    return (strip * GROUP + inner % high) * ROWS, (inner // high) * COLUMNS


@triton.jit
def _matmul_described(
    a_tiles,
    b_tiles,
    scale_ptrs,
    out_ptr,
    shape,
    SQUARE_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """`_matmul` of operands with tensor descriptors, which read zeros past an end, so nothing is masked.

    Descriptors are arguments of their own: Triton's launcher does not find them inside a tuple.
    """
    m, n, k = shape
    a_scale_ptr, b_scale_ptr = scale_ptrs
    steps = tl.cdiv(k, _SIDE)
    first_row, first_column = _tile_of(m, n, ROWS, COLUMNS, GROUP)
    row = first_row + tl.arange(0, ROWS)
    column = first_column + tl.arange(0, COLUMNS)
    a_scale_at = a_scale_ptr + tl.minimum(row, m - 1) * steps
    b_scale_at = b_scale_ptr + tl.minimum(column, n - 1) * steps
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(steps):
        a = a_tiles.load([first_row, step * _SIDE])
        b = b_tiles.load([first_column, step * _SIDE])
        a_scale = tl.load(a_scale_at + step)
        if SQUARE_B:  # one scale for all columns of the tile
            scale = (a_scale * tl.load(b_scale_ptr + first_column // _SIDE * steps + step))[:, None]
        else:
            scale = a_scale[:, None] * tl.load(b_scale_at + step)[None, :]
        total += tl.dot(a, b.T) * scale
    place = out_ptr + row.to(tl.int64)[:, None] * n + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


@triton.jit
def _matmul(
    a_ptrs,
    b_ptrs,
    out_ptr,
    shape,
    SQUARE_B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out [m, n] = a [m, k] @ b [n, k]ᵀ; pointers come with their scales', 1x128 or (SQUARE_B) 128x128 for b."""
    m, n, k = shape
    a_ptr, a_scale_ptr = a_ptrs
    b_ptr, b_scale_ptr = b_ptrs
    steps = tl.cdiv(k, _SIDE)
    first_row, first_column = _tile_of(m, n, ROWS, COLUMNS, GROUP)
    row = (first_row + tl.arange(0, ROWS)).to(tl.int64)
    column = (first_column + tl.arange(0, COLUMNS)).to(tl.int64)
    depth = tl.arange(0, _SIDE)
    a_at = a_ptr + row[:, None] * k + depth[None, :]
    b_at = b_ptr + column[None, :] * k + depth[:, None]
    a_scale_at = a_scale_ptr + row * steps
    b_scale_at = b_scale_ptr + (column // _SIDE if SQUARE_B else column) * steps
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for step in range(steps):
        remaining_depth = k - step * _SIDE
        a = tl.load(a_at, mask=(row[:, None] < m) & (depth[None, :] < remaining_depth), other=0.0)
        b = tl.load(b_at, mask=(column[None, :] < n) & (depth[:, None] < remaining_depth), other=0.0)
        a_scale = tl.load(a_scale_at + step, mask=row < m, other=0.0)
        b_scale = tl.load(b_scale_at + step, mask=column < n, other=0.0)
        total += tl.dot(a, b) * a_scale[:, None] * b_scale[None, :]
        a_at += _SIDE
        b_at += _SIDE
    place = out_ptr + row[:, None] * n + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=(row[:, None] < m) & (column[None, :] < n))


def cast(t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool) -> Cast:
    """See `reference.cast`; t is contiguous."""
    q, scale, turned, turned_scale = empty_cast(t, scaling, dtype, transposed)
    rows, columns = t.shape
    if not t.numel():
        return Cast(q, scale, turned, turned_scale)
    largest = scale, scale
    if scaling in (TENSOR, ROW):
        maxima_count = rows + columns if scaling == ROW else 1
        maxima = torch.zeros(maxima_count, dtype=torch.int32, device=t.device)
        largest = maxima, maxima[rows:] if scaling == ROW else maxima
        size = 64
        launch = _largest[(triton.cdiv(rows, size) * triton.cdiv(columns, size),)]  # pyright: ignore[reportIndexIssue]
        launch(t, *largest, (rows, columns), SCALING=scaling, TURNED=transposed, SIZE=size, num_warps=4)
    size = SIDE if scaling in (BLOCK, SQUARE) else 64
    launch = _cast[(triton.cdiv(rows, size) * triton.cdiv(columns, size),)]  # pyright: ignore[reportIndexIssue]
    launch(
        t,
        (q, turned),
        (scale, turned_scale),
        largest,
        (rows, columns, turned.shape[-1]),
        (torch.finfo(dtype).max, 1.0),
        SCALING=scaling,
        TURNED=transposed,
        SIZE=size,
        ON_CPU=t.device.type == "cpu" and os.environ.get("TRITON_INTERPRET") == "1",
        num_warps=8 if size == SIDE else 4,
    )
    return Cast(q, scale, turned, turned_scale)


def block_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """a [M, K] @ b [N, K]ᵀ with 1x128 scales of a and 1x128 or 128x128 scales of b, in `dtype`."""
    (m, k), n = a.shape, b.shape[0]
    out = torch.empty(m, n, dtype=dtype, device=a.device)
    if not out.numel():
        return out
    square = b_scale.shape[0] != n
    described = k % 16 == 0 and all(
        t.data_ptr() % 16 == 0 for t in (a, b)
    )  # what a tensor descriptor asks of fp8
    # 128x128 scales of b: 904 TFLOP/s, through pointers and masks 644. Scales of every column take registers: 657 with
    # 64 rows on 4 warps, 515 with 128 on 8, 366 through pointers (8192 cubed, H200, Triton 3.6).
    rows, warps, stages = (64, 4, 3) if described and not square else (128, 8, 4)
    programs = (triton.cdiv(m, rows) * triton.cdiv(n, 128),)
    options = {"ROWS": rows, "COLUMNS": 128, "GROUP": 8, "num_warps": warps, "num_stages": stages}
    if described:
        tiles = [TensorDescriptor.from_tensor(t, [side, SIDE]) for t, side in ((a, rows), (b, 128))]
        launch = _matmul_described[programs]  # pyright: ignore[reportIndexIssue]
        launch(*tiles, (a_scale, b_scale), out, (m, n, k), square, **options)
    else:
        launch = _matmul[programs]  # pyright: ignore[reportIndexIssue]
        launch((a, a_scale), (b, b_scale), out, (m, n, k), square, **options)
    return out
