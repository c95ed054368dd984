"""RMSNorm as operators over the kernels of norms of rows."""

from __future__ import annotations

from functools import partial

import torch

from cai_kernels import row_norm
from cai_kernels.ops import define, gradients_of
from cai_kernels.rms_norm import reference


def _rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., D], weight [D] -> (y [..., D], reciprocal root mean square [T] in float32)."""
    return _forward(row_norm.forward, x, weight, eps, casting)


def _forward(norm, x, weight, eps, casting):
    y, _, _, rstd = norm(x, None, weight, None, eps, casting)
    return y, rstd


def _rms_norm_backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    rstd: torch.Tensor,
    casting: str,
    need_x: bool,
    weight_dtype: torch.dtype | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of x [..., D] and weight [D]; one not needed (its dtype None) is empty."""
    return _backward(row_norm.backward, dy, x, weight, rstd, casting, need_x, weight_dtype)


def _backward(norm, dy, x, weight, rstd, casting, need_x, weight_dtype):
    needed = row_norm.Needed(need_x, weight_dtype)
    dx, dw, _ = norm(dy, x, weight, (None, rstd), None, casting, needed)
    return dx, dw


def _save(ctx, inputs, output) -> None:
    x, weight, ctx.eps, ctx.casting = inputs
    _, rstd = output
    ctx.save_for_backward(x, weight, rstd)
    ctx.mark_non_differentiable(rstd)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, dy, _rstd):
    if dy is None:
        return None, None, None, None
    x, weight, rstd = ctx.saved_tensors
    need_x, need_weight, _, _ = ctx.needs_input_grad
    dx, dw = rms_norm_backward(
        dy, x, weight, rstd, ctx.casting, need_x, weight.dtype if need_weight else None
    )
    return dx if need_x else None, dw if need_weight else None, None, None


def _differentiate_again(ctx, dy, _rstd):
    if dy is None:
        return None, None, None, None
    x, weight, _ = ctx.saved_tensors

    def plain(x, weight):
        return reference.rms_norm(x, weight, ctx.eps, ctx.casting)

    return *gradients_of(plain, (x, weight), ctx.needs_input_grad[:2], dy), None, None


rms_norm_backward = define(_rms_norm_backward, partial(_backward, row_norm.empty_gradients))
rms_norm = define(
    _rms_norm,
    partial(_forward, row_norm.empty),
    save=_save,
    backward=_differentiate,
    twice=_differentiate_again,
)
