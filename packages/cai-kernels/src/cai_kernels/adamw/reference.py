"""The step of AdamW in plain torch."""

from __future__ import annotations

import math

import torch

from cai_kernels.adamw.halves import join, split
from cai_kernels.adamw.options import AdamWOptions, Tensors


def adamw_step(tensors: Tensors, options: AdamWOptions, step: int, grad_scale: float | torch.Tensor) -> None:
    """Step in place: parameter and moments are float32, the gradient is of any floating dtype; all of one shape.

    With a lower half, the parameter is in halves. A scale that lies on the device and is not finite leaves all as they
    are.
    """
    param, grad, exp_avg, exp_avg_sq, low = tensors
    if low is not None:
        full = join(param, low)
        adamw_step(Tensors(full, grad, exp_avg, exp_avg_sq, None), options, step, grad_scale)
        for half, value in zip((param, low), split(full), strict=True):
            half.copy_(value)
        return
    scale = grad_scale.float().reshape(()) if isinstance(grad_scale, torch.Tensor) else grad_scale
    scaled = grad.float() * scale
    correction1, correction2 = 1 - options.beta1**step, 1 - options.beta2**step
    first = exp_avg.lerp(scaled, 1 - options.beta1)
    second = (exp_avg_sq * options.beta2).addcmul_(scaled, scaled, value=1 - options.beta2)
    denominator = second.sqrt().div_(math.sqrt(correction2)).add_(options.eps)
    stepped = (param * (1 - options.lr * options.weight_decay)).addcdiv_(
        first, denominator, value=-options.lr / correction1
    )
    for state, value in ((param, stepped), (exp_avg, first), (exp_avg_sq, second)):
        state.copy_(torch.where(scale.isfinite(), value, state) if isinstance(scale, torch.Tensor) else value)
