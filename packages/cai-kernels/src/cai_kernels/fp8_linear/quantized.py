"""The operators of the FP8 linear layer: a cast, and the layer itself with three FP8 products.

`scaling` is TENSOR, ROW or BLOCK; `triton` is False for the emulation in plain torch.
"""

from __future__ import annotations

import torch

from cai_kernels.fp8_linear import reference
from cai_kernels.fp8_linear.reference import BLOCK, ROW, SQUARE, TENSOR, Cast
from cai_kernels.ops import define

NUMBERS = torch.float8_e4m3fn  # of x and the weight


def gradient_type(scaling: int) -> torch.dtype:
    """One scale for a whole gradient needs the range of e5m2; finer scales spare it."""
    return torch.float8_e5m2 if scaling == TENSOR else NUMBERS


def weight_scaling(scaling: int) -> int:
    """How the weight is scaled: in squares where the others are in blocks."""
    return SQUARE if scaling == BLOCK else scaling


def _cast(t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool, triton: bool) -> Cast:
    if not triton:
        return reference.cast(t, scaling, dtype, transposed)
    from cai_kernels.fp8_linear import triton as kernels

    return kernels.cast(t, scaling, dtype, transposed)


def _fp8_cast(
    t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool, triton: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return _cast(t, scaling, dtype, transposed, triton)


def _empty_cast(
    t: torch.Tensor, scaling: int, dtype: torch.dtype, transposed: bool, triton: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    return reference.empty_cast(t, scaling, dtype, transposed)


def matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    dtype: torch.dtype,
    scaling: int,
    triton: bool,
    fast: bool,
) -> torch.Tensor:
    """a [M, K] @ b [N, K]ᵀ in `dtype`: cuBLAS for one scale or scales of rows, Triton for blocks."""
    if not triton or 0 in (a.shape[0], b.shape[0], a.shape[1]):
        return reference.matmul(a, a_scale, b, b_scale, dtype)
    if scaling == BLOCK:
        from cai_kernels.fp8_linear import triton as kernels

        return kernels.block_matmul(a, a_scale, b, b_scale, dtype)
    if not a.is_cuda:
        return reference.matmul(a, a_scale, b, b_scale, dtype)
    out = torch.bfloat16 if scaling == ROW else dtype
    product = torch._scaled_mm(
        a, b.t(), scale_a=a_scale, scale_b=b_scale.t(), out_dtype=out, use_fast_accum=fast
    )
    return product.to(dtype)


def _fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_cast: list[torch.Tensor],
    scaling: int,
    triton: bool,
    fast: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, in], weight [out, in] and its cast -> (y [T, out], xᵀ in float8 and its scales, if `keep`)."""
    q, scale, turned, turned_scale = _cast(x, scaling, NUMBERS, keep, triton)
    y = matmul(q, scale, weight_cast[0], weight_cast[1], x.dtype, scaling, triton, fast)
    return y if bias is None else y.add_(bias), turned, turned_scale


def _empty_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    weight_cast: list[torch.Tensor],
    scaling: int,
    triton: bool,
    fast: bool,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    _, _, turned, turned_scale = reference.empty_cast(x, scaling, NUMBERS, keep)
    return x.new_empty(x.shape[0], weight.shape[0]), turned, turned_scale


def _fp8_linear_backward(
    dy: torch.Tensor,
    x_cast: list[torch.Tensor],
    weight_cast: list[torch.Tensor],
    wanted: list[bool],
    scaling: int,
    triton: bool,
    fast: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; one that is not wanted has no elements."""
    q, scale, turned, turned_scale = _cast(dy, scaling, gradient_type(scaling), wanted[1], triton)
    dx = dw = dy.new_empty(0)
    if wanted[0]:
        dx = matmul(q, scale, weight_cast[2], weight_cast[3], dy.dtype, scaling, triton, fast)
    if wanted[1]:
        dw = matmul(turned, turned_scale, x_cast[0], x_cast[1], dy.dtype, scaling, triton, fast)
    return dx, dw if wanted[0] or wanted[1] else dy.new_empty(0)


def _empty_backward(
    dy: torch.Tensor,
    x_cast: list[torch.Tensor],
    weight_cast: list[torch.Tensor],
    wanted: list[bool],
    scaling: int,
    triton: bool,
    fast: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = weight_cast[2].shape[0]
    dx = dy.new_empty((dy.shape[0], columns) if wanted[0] else (0,))
    return dx, dy.new_empty((dy.shape[1], columns) if wanted[1] else (0,))


def _save(ctx, inputs, output) -> None:
    _, weight, _, weight_cast, scaling, triton, fast, _ = inputs
    _, turned, turned_scale = output
    ctx.save_for_backward(turned, turned_scale, *weight_cast)
    ctx.mark_non_differentiable(turned, turned_scale)
    ctx.set_materialize_grads(False)
    ctx.options, ctx.weight_dtype = (scaling, triton, fast), weight.dtype


def _differentiate(ctx, dy, *_):
    if dy is None:
        return None, None, None, [None] * 4, None, None, None, None
    turned, turned_scale, *weight_cast = ctx.saved_tensors
    need_x, need_w, need_b = ctx.needs_input_grad[:3]
    dy = dy.contiguous()
    dx = dw = None
    if need_x or need_w:
        dx, dw = fp8_linear_backward(dy, [turned, turned_scale], weight_cast, [need_x, need_w], *ctx.options)
    db = dy.sum(0) if need_b else None
    gradients = (dx if need_x else None, dw.to(ctx.weight_dtype) if need_w else None, db)
    return *gradients, [None] * len(weight_cast), None, None, None, None


fp8_cast = define(_fp8_cast, _empty_cast)
fp8_linear_backward = define(_fp8_linear_backward, _empty_backward)
fp8_linear = define(_fp8_linear, _empty_linear, save=_save, backward=_differentiate)
