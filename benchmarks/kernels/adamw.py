"""Cases of adamw_step_ and adamw_steps_: clipped gradients and a step; others pass over the gradients twice.

One flat shard, and the parameters of a UNet, one tensor each.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from case import Case

from cai_kernels import AdamWOptions, adamw_steps_

OPTIONS = AdamWOptions(lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1)
FACTOR = 0.5


def lists(tensors: tuple[torch.Tensor, ...]) -> list[list[torch.Tensor]]:
    """Parameters, gradients, first and second moments, steps."""
    count = len(tensors) // 5
    return [list(tensors[i * count : (i + 1) * count]) for i in range(5)]


def ours(*tensors: torch.Tensor) -> None:
    *columns, steps = lists(tensors)
    adamw_steps_(*columns, OPTIONS, steps=[10] * len(steps), grad_scale=FACTOR)


def eager(*tensors: torch.Tensor) -> None:
    params, grads, exp_avgs, exp_avg_sqs, steps = lists(tensors)
    torch._foreach_mul_(grads, FACTOR)
    torch._fused_adamw_(
        params,
        grads,
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        amsgrad=False,
        lr=OPTIONS.lr,
        beta1=OPTIONS.beta1,
        beta2=OPTIONS.beta2,
        weight_decay=OPTIONS.weight_decay,
        eps=OPTIONS.eps,
        maximize=False,
    )


def unet() -> list[int]:
    """Sizes of 686 parameters, 851 million values: as many vectors as matrices and convolutions, nearly."""
    vectors = [320, 640, 1280] * 117
    return vectors + [409_600, 1_638_400, 3_276_800, 3_686_400, 3_686_400] * 67


def cases(tiny: bool) -> Iterator[Case]:
    one = [("tiny", [5000])] if tiny else [("64Mi", [2**26]), ("512Mi", [2**29]), ("64Mi, odd", [2**26 + 1])]
    many = [("tiny, 3 tensors", [5, 5000, 2048])] if tiny else [("686 tensors of a UNet", unet())]
    for op, label, sizes in [("adamw_step_", *each) for each in one] + [
        ("adamw_steps_", *each) for each in many
    ]:

        def make(device: torch.device, sizes=sizes) -> tuple:
            tensors = [torch.rand(size, device=device) for _ in range(4) for size in sizes]
            return (*tensors, *(torch.full((), 10.0, device=device) for _ in sizes))

        yield Case(op, label, make, ours=ours, eager=eager, forward_bytes=28 * sum(sizes))
