"""RMSNorm in Triton: one row a program forward; backward keeps weight gradients of many rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from cai_kernels.launch import power_of_2, row_warps, waves
from cai_kernels.ops import define

MAX_COLUMNS = 65536


@triton.jit
def _forward(x_ptr, w_ptr, y_ptr, rstd_ptr, columns, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
    rstd = 1.0 / tl.sqrt(tl.sum(x * x, 0) / columns + eps)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    normalized = (x * rstd).to(y_ptr.dtype.element_ty).to(tl.float32)
    tl.store(y_ptr + row * columns + at, (normalized * w).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, columns, rows_each, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < columns
    w = tl.load(w_ptr + at, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros((BLOCK,), dtype=tl.float32)
    for row in range(program * rows_each, tl.minimum((program + 1) * rows_each, rows)):
        x = tl.load(x_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dy_ptr + row * columns + at, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        normalized = x * rstd
        dw += dy * normalized
        scaled = dy * w
        mean = tl.sum(scaled * normalized, 0) / columns
        dx = (scaled - normalized * mean) * rstd
        tl.store(dx_ptr + row * columns + at, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + program * columns + at, dw, mask=inside)


def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x [T, D] contiguous, weight [D] -> (y [T, D], reciprocal root mean square [T] in float32)."""
    rows, columns = x.shape
    y, rstd = _empty(x, weight, eps)
    block = power_of_2(columns)
    if rows:
        launch = _forward[(rows,)]  # pyright: ignore[reportIndexIssue]
        launch(x, weight, y, rstd, columns, eps, BLOCK=block, num_warps=row_warps(block))
    return y, rstd


def _rms_norm_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [T, D] and weight [D]. Partial weight gradients are float32, one row of them a program."""
    rows, columns = x.shape
    dx, dw = _empty_gradients(dy, x, weight, rstd)
    programs = min(rows, waves(x.device, 2))
    if programs == 0:
        return dx, dw.zero_()
    partial = torch.empty(programs, columns, dtype=torch.float32, device=x.device)
    block = power_of_2(columns)
    each = triton.cdiv(rows, programs)
    launch = _backward[(programs,)]  # pyright: ignore[reportIndexIssue]
    launch(dy, x, weight, rstd, dx, partial, rows, columns, each, BLOCK=block, num_warps=row_warps(block))
    return dx, partial.sum(0).to(weight.dtype)


def _empty(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty(x.shape[0], dtype=torch.float32)


def _empty_gradients(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _save(ctx, inputs, output) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _rstd):
    if dy is None:
        return None, None, None
    x, weight, rstd = ctx.saved_tensors
    dx, dw = rms_norm_backward(dy.contiguous(), x, weight, rstd)
    return dx, dw, None


rms_norm_backward = define(_rms_norm_backward, _empty_gradients)
rms_norm = define(_rms_norm, _empty, save=_save, backward=_differentiate)
