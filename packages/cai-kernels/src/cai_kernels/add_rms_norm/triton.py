"""Residual sum and RMSNorm as operators over the kernels of norms of rows."""

from __future__ import annotations

from functools import partial

import torch

from cai_kernels import row_norm
from cai_kernels.ops import define


def _add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight [D] -> (y, x + residual [..., D], reciprocal root mean square [T] in float32)."""
    return _forward(row_norm.forward, x, residual, weight, eps, casting)


def _forward(norm, x, residual, weight, eps, casting):
    y, total, _, rstd = norm(x, residual, weight, None, eps, casting)
    return y, total, rstd


def _add_rms_norm_backward(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    total: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    casting: str,
    need_sum: bool,
    weight_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradient of x and residual, which is one [..., D], and of weight [D]; one not needed is empty."""
    return _backward(row_norm.backward, dy, dsum, total, weight, rstd, casting, need_sum, weight_dtype)


def _backward(norm, dy, dsum, total, weight, rstd, casting, need_sum, weight_dtype):
    needed = row_norm.Needed(need_sum, weight_dtype)
    dtotal, dw, _ = norm(dy, total, weight, (None, rstd), dsum, casting, needed)
    return dtotal, dw


def _save(ctx, inputs, output) -> None:
    _, _, weight, _, ctx.casting = inputs
    _, total, rstd = output
    ctx.save_for_backward(total, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, dsum, _rstd):
    if dy is None:
        return dsum, dsum, None, None, None
    total, weight, rstd = ctx.saved_tensors
    x, residual, parameter = ctx.needs_input_grad[:3]
    dtype = weight.dtype if parameter else None
    dx, dw = add_rms_norm_backward(dy, dsum, total, weight, rstd, ctx.casting, x or residual, dtype)
    return dx if x else None, dx if residual else None, dw if parameter else None, None, None


add_rms_norm_backward = define(_add_rms_norm_backward, partial(_backward, row_norm.empty_gradients))
add_rms_norm = define(_add_rms_norm, partial(_forward, row_norm.empty), save=_save, backward=_differentiate)
