"""The arguments of a step of AdamW: its numbers, and the tensors of one parameter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from cai_kernels.errors import KernelError


@dataclass(frozen=True)
class AdamWOptions:
    """The numbers of AdamW, by default those of `torch.optim.AdamW`.

    Args:
        lr: the learning rate.
        beta1, beta2: the part of the first and of the second moment that a step keeps, in [0, 1).
        eps: added to the square root of the second moment.
        weight_decay: `lr * weight_decay` of a parameter is taken off it.

    Raises `KernelError` for a beta outside [0, 1).
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        for name, beta in (("beta1", self.beta1), ("beta2", self.beta2)):
            if not 0.0 <= beta < 1.0:
                raise KernelError(f"{name} is out of range", got=beta, expected="at least 0, below 1")


class Tensors(NamedTuple):
    """The tensors of one parameter.

    Args:
        param: float32, or the upper half of the parameter, bfloat16.
        grad: the gradient.
        exp_avg, exp_avg_sq: the first and the second moment.
        low: the lower half, where the parameter is in halves.
    """

    param: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    low: torch.Tensor | None
