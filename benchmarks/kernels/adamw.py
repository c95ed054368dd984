"""Cases of adamw_step_: clipped gradients and a step, on one flat shard; others pass over the gradient twice."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import AdamWOptions, adamw_step_

OPTIONS = AdamWOptions(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
FACTOR = 0.5


def ours(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
) -> None:
    adamw_step_(param, grad, exp_avg, exp_avg_sq, OPTIONS, step=10, grad_scale=FACTOR)


def eager(
    param: torch.Tensor,
    grad: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    step: torch.Tensor,
) -> None:
    torch._foreach_mul_([grad], FACTOR)
    torch._fused_adamw_(
        [param],
        [grad],
        [exp_avg],
        [exp_avg_sq],
        [],
        [step],
        amsgrad=False,
        lr=OPTIONS.lr,
        beta1=OPTIONS.beta1,
        beta2=OPTIONS.beta2,
        weight_decay=OPTIONS.weight_decay,
        eps=OPTIONS.eps,
        maximize=False,
    )


def cases(tiny: bool) -> Iterator[Case]:
    for label, size in (
        [("tiny", 5000)] if tiny else [("64Mi", 2**26), ("512Mi", 2**29), ("64Mi, odd", 2**26 + 1)]
    ):

        def make(device: torch.device, size=size) -> tuple:
            tensors = [torch.rand(size, device=device) for _ in range(4)]
            return (*tensors, torch.full((), 10.0, device=device))

        yield Case("adamw_step_", label, make, ours=ours, eager=eager, forward_bytes=28 * size)
