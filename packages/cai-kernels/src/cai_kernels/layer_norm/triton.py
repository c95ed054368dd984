"""Layer norm as operators over the kernels of norms of rows."""

from __future__ import annotations

from functools import partial

import torch

from cai_kernels import row_norm
from cai_kernels.layer_norm import reference
from cai_kernels.ops import define, gradients_of


def _layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [..., D], weight, bias [D] -> (y [..., D], mean [T], reciprocal deviation [T], both in float32)."""
    return _forward(row_norm.forward, x, weight, bias, eps)


def _forward(norm, x, weight, bias, eps):
    y, _, mean, rstd = norm(x, None, weight, bias, eps, "layer")
    return y, mean, rstd


def _layer_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    need_x: bool,
    weight_dtype: torch.dtype | None,
    bias_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of x [..., D], weight and bias [D]; one not needed (its dtype None) is empty."""
    return _backward(row_norm.backward, dy, x, weight, mean, rstd, need_x, weight_dtype, bias_dtype)


def _backward(norm, dy, x, weight, mean, rstd, need_x, weight_dtype, bias_dtype):
    needed = row_norm.Needed(need_x, weight_dtype, bias_dtype)
    return norm(dy, x, weight, (mean, rstd), None, "layer", needed)


def _save(ctx, inputs, output) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.save_for_backward(x, weight, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _mean, _rstd):
    if dy is None:
        return None, None, None, None
    x, weight, mean, rstd = ctx.saved_tensors
    need_x, need_weight, need_bias, _ = ctx.needs_input_grad
    dtypes = (weight.dtype if need_weight else None, ctx.bias_dtype if need_bias else None)
    dx, dw, db = layer_norm_backward(dy, x, weight, mean, rstd, need_x, *dtypes)
    return dx if need_x else None, dw if need_weight else None, db if need_bias else None, None


def _differentiate_again(ctx, dy, _mean, _rstd):
    if dy is None:
        return None, None, None, None
    x, weight, _, _ = ctx.saved_tensors
    bias = None  # no gradient depends on its values
    if ctx.bias_dtype is not None:
        bias = torch.zeros(x.shape[-1], dtype=ctx.bias_dtype, device=x.device, requires_grad=True)

    def plain(x, weight, bias):
        return reference.layer_norm(x, weight, bias, ctx.eps)

    return *gradients_of(plain, (x, weight, bias), ctx.needs_input_grad[:3], dy), None


layer_norm_backward = define(_layer_norm_backward, partial(_backward, row_norm.empty_gradients))
layer_norm = define(
    _layer_norm,
    partial(_forward, row_norm.empty),
    save=_save,
    backward=_differentiate,
    twice=_differentiate_again,
)
