"""The operators of the FP8 linear layer: a cast, and the layer itself with three FP8 products.

`scaling` is TENSOR, ROW or BLOCK; `triton` is False for the emulation in plain torch.
"""

from __future__ import annotations

import torch

from cai_kernels.fp8_linear import reference
from cai_kernels.fp8_linear.reference import BLOCK, ROW, SQUARE, TENSOR, Cast
from cai_kernels.ops import define

NUMBERS = torch.float8_e4m3fn  # dtype of x and the weight


def gradient_type(scaling: int) -> torch.dtype:
    """The dtype of gradients: with one scale for a whole gradient e5m2 for its range, with finer scales e4m3."""
    return torch.float8_e5m2 if scaling == TENSOR else NUMBERS


def weight_scaling(scaling: int) -> int:
    """Scaling of the weight: in squares of 128x128 where the other operands are scaled in blocks of 1x128."""
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
    weight_fp8: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_transposed: torch.Tensor,
    weight_transposed_scale: torch.Tensor,
    *,
    scaling: int,
    triton: bool,
    fast: bool,
    keep_x: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, in], weight [out, in] and its cast -> (y [T, out], xᵀ in float8 and its scales, if `keep_x`)."""
    q, scale, transposed, transposed_scale = _cast(x, scaling, NUMBERS, keep_x, triton)
    y = matmul(q, scale, weight_fp8, weight_scale, x.dtype, scaling, triton, fast)
    return y if bias is None else y.add_(bias), transposed, transposed_scale


def _empty_linear(
    x: torch.Tensor, weight: torch.Tensor, *_tensors: torch.Tensor | None, scaling: int, keep_x: bool, **_
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    cast = reference.empty_cast(x, scaling, NUMBERS, keep_x)
    return x.new_empty(x.shape[0], weight.shape[0]), cast.transposed, cast.transposed_scale


def _fp8_linear_backward(
    dy: torch.Tensor,
    x_transposed: torch.Tensor,
    x_transposed_scale: torch.Tensor,
    weight_transposed: torch.Tensor,
    weight_transposed_scale: torch.Tensor,
    *,
    need_x: bool,
    need_weight: bool,
    scaling: int,
    triton: bool,
    fast: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x and weight; one that is not needed has no elements."""
    dtype, cast = dy.dtype, _cast(dy, scaling, gradient_type(scaling), need_weight, triton)
    q, scale, transposed, transposed_scale = cast
    dx, dw = dy.new_empty(0), dy.new_empty(0)
    if need_x:
        dx = matmul(q, scale, weight_transposed, weight_transposed_scale, dtype, scaling, triton, fast)
    if need_weight:
        dw = matmul(
            transposed, transposed_scale, x_transposed, x_transposed_scale, dtype, scaling, triton, fast
        )
    return dx, dw


def _empty_backward(
    dy: torch.Tensor,
    x_transposed: torch.Tensor,
    x_transposed_scale: torch.Tensor,
    weight_transposed: torch.Tensor,
    weight_transposed_scale: torch.Tensor,
    *,
    need_x: bool,
    need_weight: bool,
    **_,
) -> tuple[torch.Tensor, torch.Tensor]:
    columns = weight_transposed.shape[0]
    dx = dy.new_empty((dy.shape[0], columns) if need_x else (0,))
    return dx, dy.new_empty((dy.shape[1], columns) if need_weight else (0,))


def _save(ctx, inputs, keyword_only_inputs, output) -> None:
    _, weight, _, _, _, weight_transposed, weight_transposed_scale = inputs
    _, x_transposed, x_transposed_scale = output
    ctx.save_for_backward(x_transposed, x_transposed_scale, weight_transposed, weight_transposed_scale)
    ctx.mark_non_differentiable(x_transposed, x_transposed_scale)
    ctx.set_materialize_grads(False)
    ctx.options = {name: keyword_only_inputs[name] for name in ("scaling", "triton", "fast")}
    ctx.weight_dtype = weight.dtype


def _differentiate(ctx, dy, *_):
    if dy is None:
        return (None,) * 7
    need_x, need_weight, need_bias, *_ = ctx.needs_input_grad
    dy = dy.contiguous()
    dx = dw = None
    if need_x or need_weight:
        dx, dw = fp8_linear_backward(
            dy, *ctx.saved_tensors, need_x=need_x, need_weight=need_weight, **ctx.options
        )
    return (
        dx if need_x else None,
        dw.to(ctx.weight_dtype) if need_weight else None,
        dy.sum(0) if need_bias else None,
        *(None,) * 4,
    )


def _fp8_matmul(
    a: torch.Tensor,
    a_scale: torch.Tensor,
    b: torch.Tensor,
    b_scale: torch.Tensor,
    *,
    dtype: torch.dtype,
    scaling: int,
    triton: bool,
    fast: bool,
) -> torch.Tensor:
    return matmul(a, a_scale, b, b_scale, dtype, scaling, triton, fast)


def _empty_matmul(
    a: torch.Tensor, a_scale: torch.Tensor, b: torch.Tensor, b_scale: torch.Tensor, *, dtype: torch.dtype, **_
) -> torch.Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


fp8_cast = define(_fp8_cast, _empty_cast)
fp8_matmul = define(_fp8_matmul, _empty_matmul)
fp8_linear_backward = define(_fp8_linear_backward, _empty_backward)
fp8_linear = define(
    _fp8_linear,
    _empty_linear,
    save=_save,
    backward=_differentiate,
    otherwise="take torch.nn.functional.linear for it",
)
