"""The step of AdamW in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cai_kernels.adamw.halves import join, split

if TYPE_CHECKING:
    from cai_kernels.adamw.function import AdamWOptions


def adamw_step(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    options: AdamWOptions,
    step: int,
    grad_scale: float | torch.Tensor,
    low: torch.Tensor | None = None,
) -> None:
    """In place: `param`, `exp_avg` and `exp_avg_sq` are float32, `grad` is of any floating dtype; all of one shape.

    With `low` (int16), `param` is bfloat16 and they are the halves of the parameter. A scale that lies on the device
    and is not finite leaves all as they are.
    """
    if low is not None:
        full = join(param, low)
        adamw_step(full, grad, exp_avg, exp_avg_sq, options, step, grad_scale)
        for held, value in zip((param, low), split(full), strict=True):
            held.copy_(value)
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
    for held, value in ((param, stepped), (exp_avg, first), (exp_avg_sq, second)):
        held.copy_(torch.where(scale.isfinite(), value, held) if isinstance(scale, torch.Tensor) else value)
