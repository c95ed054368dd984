"""GELU of a biased input in Triton; backward walks down columns and keeps the bias gradient in registers."""

from __future__ import annotations

import torch

from cai_kernels.activations import activation
from cai_kernels.column_sums import column_sums
from cai_kernels.compiler import tl, triton
from cai_kernels.launch import power_of_2, waves
from cai_kernels.ops import define
from cai_kernels.rows import as_rows

VALUES, BLOCK = 4096, 256  # values of a tile, and columns


@triton.jit
def _forward(x_ptr, bias_ptr, y_ptr, shape, KIND: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    blocks, rows, columns, x_stride = shape
    row = (tl.program_id(0) // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = (row < rows) & (at < columns)
    x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
    x += tl.load(bias_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    value, _ = activation(x, KIND)
    tl.store(y_ptr + row * columns + at, value.to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    inputs, outputs, shape, KIND: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    dy_ptr, x_ptr, bias_ptr = inputs
    dx_ptr, dbias_ptr = outputs
    rows, columns, dy_stride, x_stride = shape
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    bias = tl.load(bias_ptr + at, mask=at < columns, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    part = tl.program_id(1).to(tl.int64)
    for block in tl.range(part, tl.cdiv(rows, ROWS), tl.num_programs(1), num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (at < columns)
        x = tl.load(x_ptr + row * x_stride + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * dy_stride + at, mask=inside, other=0.0).to(tl.float32)
        _, slope = activation(x + bias, KIND)
        dx = dy * slope
        total += dx
        if dx_ptr is not None:
            tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    if dbias_ptr is not None:
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(dbias_ptr + part * columns + at, tl.sum(total, 0), mask=at < columns)


def _tile(rows: int, columns: int) -> tuple[int, int]:
    block = min(power_of_2(columns), BLOCK)
    return min(power_of_2(rows), VALUES // block), block


def _gelu_bias(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    """x [..., F], bias [F] -> [..., F] contiguous."""
    y = x.new_empty(x.shape)
    if y.numel():
        x = as_rows(x)
        rows, columns = x.shape
        tile_rows, block = _tile(rows, columns)
        blocks = triton.cdiv(columns, block)
        launch = _forward[(blocks * triton.cdiv(rows, tile_rows),)]  # pyright: ignore[reportIndexIssue]
        shape = (blocks, rows, columns, x.stride(0))
        launch(
            x,
            bias,
            y,
            shape,
            KIND=kind,
            ROWS=tile_rows,
            BLOCK=block,
            num_warps=max(tile_rows * block // 512, 1),
        )
    return y


def _gelu_bias_backward(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str, need_x: bool, need_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [..., F] and bias [F]; one that is not needed is empty."""
    dx, dbias = _empty_gradients(dy, x, bias, kind, need_x, need_bias)
    if x.numel() == 0:
        return dx, dbias.zero_()
    dy, x = as_rows(dy), as_rows(x)
    rows, columns = x.shape
    tile_rows, block = _tile(rows, columns)
    blocks = triton.cdiv(columns, block)
    parts = min(triton.cdiv(rows, tile_rows), max(waves(x.device, 2) // blocks, 1))
    partial = x.new_empty(parts, columns, dtype=torch.float32) if need_bias else None
    launch = _backward[(blocks, parts)]  # pyright: ignore[reportIndexIssue]
    shape, outputs = (rows, columns, dy.stride(0), x.stride(0)), (dx if need_x else None, partial)
    sizes = {"STAGES": 3 if x.element_size() == 2 else 2, "ROWS": tile_rows, "BLOCK": block}
    launch((dy, x, bias), outputs, shape, KIND=kind, **sizes, num_warps=max(tile_rows * block // 512, 1))
    return dx, dbias if partial is None else column_sums(partial, bias.dtype)


def _empty(x: torch.Tensor, bias: torch.Tensor, kind: str) -> torch.Tensor:
    return x.new_empty(x.shape)


def _empty_gradients(
    dy: torch.Tensor, x: torch.Tensor, bias: torch.Tensor, kind: str, need_x: bool, need_bias: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if need_x else 0), bias.new_empty(bias.shape if need_bias else 0)


def _save(ctx, inputs, output) -> None:
    x, bias, ctx.kind = inputs
    ctx.save_for_backward(x, bias)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy):
    if dy is None:
        return None, None, None
    x, bias = ctx.saved_tensors
    need_x, need_bias, _ = ctx.needs_input_grad
    dx, dbias = gelu_bias_backward(dy, x, bias, ctx.kind, need_x, need_bias)
    return dx if need_x else None, dbias if need_bias else None, None


gelu_bias_backward = define(_gelu_bias_backward, _empty_gradients)
gelu_bias = define(_gelu_bias, _empty, save=_save, backward=_differentiate)
