"""Quantized weights in Triton: written out in full, or made in the tiles of a product with few rows."""

from __future__ import annotations

import os

import torch
from torch.nn import functional as F

from cai_kernels.compiler import tl, triton
from cai_kernels.launch import dot_precision, power_of_2, waves
from cai_kernels.quantized_linear.kinds import BLOCK, features_of
from cai_kernels.quantized_linear.reference import levels
from cai_kernels.rows import as_rows
from cai_kernels.tiles import dot

_BLOCK = tl.constexpr(BLOCK)
VALUES = 4096  # numbers of the weight that a program writes, at most
FEW_ROWS = {("nf4", 2): 48, ("int8", 2): 256, ("nf4", 4): 32, ("int8", 4): 32}
"""The most rows of a product that makes its weight in tiles, by kind and the bytes of a number of x: `takes_tiles`."""


@triton.jit
def _level(code, levels_ptr, PTX: tl.constexpr):
    """The level of a code of 4 bits, float32.

    The 16 levels stay in the first cache. As a load of Triton they would be copied into shared memory, number by
    number, where the loop of a product is pipelined.
    """
    place = levels_ptr + code.to(tl.int32)
    if PTX:
        return tl.inline_asm_elementwise(
            "ld.global.nc.f32 $0, [$1];", "=f,l", [place.to(tl.int64)], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        return tl.load(place)


@triton.jit
def _level_pairs(codes, levels_ptr, PTX: tl.constexpr):
    """codes [..., n], two a byte -> levels float32 [..., 2 n]."""
    return tl.interleave(_level(codes >> 4, levels_ptr, PTX), _level(codes & 15, levels_ptr, PTX))


@triton.jit
def _rounded(value, dtype: tl.constexpr, PTX: tl.constexpr):
    """Round float32 to nearest even. The interpreter's cast to bfloat16 cuts bits off, which are zeros by then."""
    if dtype == tl.bfloat16 and not PTX:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000).to(tl.float32, bitcast=True)
    return value.to(dtype)


@triton.jit
def _write_nf4(codes_ptr, scales_ptr, levels_ptr, weight_ptr, count, VALUES: tl.constexpr, PTX: tl.constexpr):
    """Write VALUES numbers of a weight of `count`, flat: blocks of 64 begin at multiples of 64."""
    first = tl.program_id(0).to(tl.int64) * VALUES
    byte = first // 2 + tl.arange(0, VALUES // 2)
    number = first + tl.arange(0, VALUES)
    codes = tl.load(codes_ptr + byte, mask=byte < count // 2, other=0)
    block = first // _BLOCK + tl.arange(0, VALUES // _BLOCK)
    scales = tl.load(scales_ptr + block, mask=block < count // _BLOCK, other=0.0)
    blocks = tl.reshape(_level_pairs(codes, levels_ptr, PTX), (VALUES // _BLOCK, _BLOCK)) * scales[:, None]
    weight = _rounded(tl.reshape(blocks, (VALUES,)), weight_ptr.dtype.element_ty, PTX)
    tl.store(weight_ptr + number, weight, mask=number < count)


@triton.jit
def _write_int8(codes_ptr, scales_ptr, weight_ptr, inputs, VALUES: tl.constexpr, PTX: tl.constexpr):
    """Write up to VALUES numbers of a row."""
    parts = tl.cdiv(inputs, VALUES)
    row = (tl.program_id(0) // parts).to(tl.int64)
    column = tl.program_id(0) % parts * VALUES + tl.arange(0, VALUES)
    codes = tl.load(codes_ptr + row * inputs + column, mask=column < inputs, other=0)
    weight = codes.to(tl.float32) * tl.load(scales_ptr + row)
    weight = _rounded(weight, weight_ptr.dtype.element_ty, PTX)
    tl.store(weight_ptr + row * inputs + column, weight, mask=column < inputs)


@triton.jit
def _weight_tile(
    stored, column, first, shape, FOUR_BITS: tl.constexpr, DEPTH: tl.constexpr, PTX: tl.constexpr
):
    """The numbers of some outputs [COLUMNS], inputs `first` to first + DEPTH, float32; zeros outside."""
    codes_ptr, scales_ptr, levels_ptr = stored
    _, inputs, outputs = shape
    inside = (column < outputs)[:, None]
    if FOUR_BITS:
        byte = first // 2 + tl.arange(0, DEPTH // 2)[None, :]
        codes = tl.load(
            codes_ptr + column[:, None] * (inputs // 2) + byte, mask=inside & (byte < inputs // 2), other=0
        )
        block = first // _BLOCK + tl.arange(0, DEPTH // _BLOCK)[None, :]
        scales = tl.load(
            scales_ptr + column[:, None] * (inputs // _BLOCK) + block,
            mask=inside & (block < inputs // _BLOCK),
            other=0.0,
        )
        pairs = _level_pairs(codes, levels_ptr, PTX)
        blocks = tl.reshape(pairs, (column.shape[0], DEPTH // _BLOCK, _BLOCK)) * scales[:, :, None]
        return tl.reshape(blocks, (column.shape[0], DEPTH))
    else:
        at = first + tl.arange(0, DEPTH)[None, :]
        codes = tl.load(codes_ptr + column[:, None] * inputs + at, mask=inside & (at < inputs), other=0)
        scales = tl.load(scales_ptr + column[:, None], mask=inside, other=0.0)
        return codes.to(tl.float32) * scales


@triton.jit
def _multiply(
    rows_ptr, stored, bias_ptr, out_ptr, shape, rows_stride,
    FOUR_BITS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
    PRECISION: tl.constexpr, PTX: tl.constexpr,
):  # fmt: skip
    """One tile of rows [T, in] @ Wᵀ, computed as its transpose: the weight, in registers, is the first operand."""
    count, inputs, outputs = shape
    across = tl.cdiv(outputs, COLUMNS)
    row = (tl.program_id(0) // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = (tl.program_id(0) % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)
    total = tl.zeros((COLUMNS, ROWS), dtype=tl.float32)
    for first in range(0, inputs, DEPTH):
        at = first + tl.arange(0, DEPTH)
        inside = (at < inputs)[:, None] & (row < count)[None, :]
        values = tl.load(rows_ptr + row[None, :] * rows_stride + at[:, None], mask=inside, other=0.0)
        weight = _weight_tile(stored, column, first, shape, FOUR_BITS, DEPTH, PTX)
        total = dot(_rounded(weight, values.dtype, PTX), values, total, PRECISION)
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + column, mask=column < outputs, other=0.0)
        total += bias.to(tl.float32)[:, None]
    place = out_ptr + row[:, None] * outputs + column[None, :]
    inside = (row < count)[:, None] & (column < outputs)[None, :]
    tl.store(place, _rounded(tl.trans(total), out_ptr.dtype.element_ty, PTX), mask=inside)


def _runs_ptx() -> bool:
    """Return whether kernels are compiled for an NVIDIA GPU, and not run by the interpreter."""
    return os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """See `reference.dequantize`."""
    codes, scales = codes.contiguous(), scales.contiguous()
    inputs, outputs = features_of(codes, kind)
    weight = torch.empty(outputs, inputs, dtype=dtype, device=codes.device)
    if kind == "nf4":
        launch = _write_nf4[(triton.cdiv(weight.numel(), VALUES),)]  # pyright: ignore[reportIndexIssue]
        launch(
            codes,
            scales,
            levels(codes.device),
            weight,
            weight.numel(),
            VALUES=VALUES,
            PTX=_runs_ptx(),
            num_warps=4,
        )
    else:
        values = min(power_of_2(inputs), VALUES)
        launch = _write_int8[(outputs * triton.cdiv(inputs, values),)]  # pyright: ignore[reportIndexIssue]
        launch(codes, scales, weight, inputs, VALUES=values, PTX=_runs_ptx(), num_warps=4)
    return weight


def takes_tiles(count: int, dtype: torch.dtype, kind: str) -> bool:
    """Return whether a product of `count` rows makes its weight in tiles rather than in memory.

    In memory an element of a 16-bit weight is written and read, 4 bytes: 0.8 ps at the 4.8 TB/s of an H200. In tiles it
    costs nothing but its codes, but the product runs at half the speed of cuBLAS or less: nf4 looks levels up. Measured
    on an H200, 4,096 inputs and 14,336 outputs, in tiles and in memory: int8 0.045 and 0.080 ms at 64 rows, 0.088 both
    at 256; nf4 0.051 and 0.076 at 16, 0.081 and 0.075 at 64, 0.196 and 0.084 at 256. In float32 there are 8 bytes,
    and 50 TFLOP/s: 40 rows.
    """
    return count <= FEW_ROWS[kind, dtype.itemsize]


def in_memory(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """Multiply rows [T, in] with the whole weight, written out in their dtype -> [T, out]."""
    return F.linear(rows, dequantize(codes, scales, kind, rows.dtype), bias)


def in_tiles(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """Multiply rows [T, in], columns contiguous, with a weight of which only tiles are made -> [T, out]."""
    inputs, outputs = features_of(codes, kind)
    count = rows.shape[0]
    out = rows.new_empty(count, outputs)
    if not count:
        return out
    stored = (codes.contiguous(), scales.contiguous(), levels(codes.device))
    high = min(max(power_of_2(count), 16), 128)
    down = triton.cdiv(count, high)
    wide = 128 if high == 128 else 64
    while wide > 16 and down * triton.cdiv(outputs, wide) < waves(
        rows.device
    ):  # every multiprocessor reads codes
        wide //= 2
    depth = 128 if high <= 32 and rows.element_size() == 2 else 64
    launch = _multiply[(down * triton.cdiv(outputs, wide),)]  # pyright: ignore[reportIndexIssue]
    launch(
        rows,
        stored,
        None if bias is None else bias.contiguous(),
        out,
        (count, inputs, outputs),
        rows.stride(0),
        FOUR_BITS=kind == "nf4",
        ROWS=high,
        COLUMNS=wide,
        DEPTH=depth,
        PRECISION=dot_precision(rows.dtype),
        PTX=_runs_ptx(),
        num_warps=8 if high == 128 else 4,
        num_stages=4,
    )
    return out


def quantized_linear(
    rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, kind: str
) -> torch.Tensor:
    """See `reference.quantized_linear`."""
    flat = as_rows(rows)
    multiply = in_tiles if takes_tiles(flat.shape[0], rows.dtype, kind) else in_memory
    return multiply(flat, codes, scales, bias, kind).view(*rows.shape[:-1], codes.shape[0])


def input_gradient(
    upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str
) -> torch.Tensor:
    """See `reference.input_gradient`; with the weight in memory, since a step that trains has many rows."""
    return upstream @ dequantize(codes, scales, kind, upstream.dtype)
