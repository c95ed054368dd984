"""The arithmetic of AdamW over stored moments: read, step, store with unbiased rounding. Pure; `torch.compile`s whole.

A stored moment is a tuple of tensors: float32 or bfloat16 [n], or the numbers uint8 [n] and scales float32
[n / 256] of `codes`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from cai_mesh import rng
from cai_zero.optimizers import codes
from cai_zero.optimizers.rounding import field, round_to_bfloat16, unit

Stored = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Scalars:
    """Hyperparameters of one step of one param group.

    Args:
        rate: lr over the first moment's bias correction.
        decay: the factor by which weights are multiplied.
        root: root of the second moment's bias correction.
        betas, eps: as of Adam.

    The first three change from step to step: as scalar tensors they are not compiled into the code.
    """

    rate: float | torch.Tensor
    decay: float | torch.Tensor
    root: float | torch.Tensor
    betas: tuple[float, float]
    eps: float


def scalars(group: dict, step: int) -> Scalars:
    """The scalars of step `step` (from 1) under the options of a param group."""
    first, second = group["betas"]
    lr = float(group["lr"])
    return Scalars(
        lr / (1 - first**step),
        1 - lr * group["weight_decay"],
        (1 - second**step) ** 0.5,
        (first, second),
        group["eps"],
    )


def as_tensors(by: Scalars) -> Scalars:
    """The same with what changes as float64 scalars on the CPU, which mix with any device without waiting."""
    changing = (torch.tensor(x, dtype=torch.float64) for x in (by.rate, by.decay, by.root))
    return Scalars(*changing, by.betas, by.eps)


def read(stored: Stored, levels: torch.Tensor | None) -> torch.Tensor:
    """A stored moment as float32."""
    if len(stored) == 1:
        return stored[0].float()
    assert levels is not None
    return codes.decode(*stored, levels)


def store(
    values: torch.Tensor, like: Stored, levels: torch.Tensor | None, bits: torch.Tensor, number: int
) -> Stored:
    """Float32 values as `like` is stored, rounded by field `number` of the random bits."""
    if len(like) == 2:
        assert levels is not None
        return codes.encode(values, levels, unit(bits, number))
    if like[0].dtype == torch.bfloat16:
        return (round_to_bfloat16(values, field(bits, number)),)
    return (values,)


def advance(
    weight: torch.Tensor,
    grad: torch.Tensor,
    moments: tuple[Stored, Stored],
    levels: tuple[torch.Tensor | None, torch.Tensor | None],
    counters: torch.Tensor,
    stream: int | torch.Tensor,
    by: Scalars,
    round_weight: bool,
) -> tuple[torch.Tensor, Stored, Stored]:
    """One step.

    Args:
        weight, grad: [n] float32.
        moments: the first and second, stored.
        levels: the levels of either, where it is stored as codes.
        counters: [n] int64, of the random bits, and `stream` their key.
        by: the step's scalars.
        round_weight: whether the weight is rounded to bfloat16, without bias.

    Returns the new weight and the new moments.
    """
    first, second = read(moments[0], levels[0]), read(moments[1], levels[1])
    first = torch.lerp(first, grad, 1 - by.betas[0])
    second = second * by.betas[1] + grad * grad * (1 - by.betas[1])
    weight = weight * by.decay - by.rate * first / (second.sqrt() / by.root + by.eps)
    bits = rng.bits(stream, counters)  # type: ignore[arg-type]
    if round_weight:
        weight = round_to_bfloat16(weight, field(bits, 0))
    new_moments = [
        store(first, moments[0], levels[0], bits, 1),
        store(second, moments[1], levels[1], bits, 2),
    ]
    return weight, new_moments[0], new_moments[1]
