"""The step of AdamW in plain torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

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
) -> None:
    """In place: `param`, `exp_avg` and `exp_avg_sq` are float32, `grad` is of any floating dtype; all of one shape."""
    scale = grad_scale.float().reshape(()) if isinstance(grad_scale, torch.Tensor) else grad_scale
    scaled = grad.float() * scale
    correction1, correction2 = 1 - options.beta1**step, 1 - options.beta2**step
    param.mul_(1 - options.lr * options.weight_decay)
    exp_avg.lerp_(scaled, 1 - options.beta1)
    exp_avg_sq.mul_(options.beta2).addcmul_(scaled, scaled, value=1 - options.beta2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(correction2)).add_(options.eps)
    param.addcdiv_(exp_avg, denominator, value=-options.lr / correction1)
