"""Schedules of learning rates, by steps: factors of the first rate as functions of the step."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim import lr_scheduler as torchs

__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]


class _Schedule(torchs.LRScheduler):
    """A schedule whose rate is a function of the step and the first rate alone.

    Args:
        optimizer: the optimizer.
        rate: (step from 0, first rate) -> rate.
        last_epoch: the step before the first; -1: there was none.
    """

    def __init__(self, optimizer: Any, rate: Callable[[int, float], float], last_epoch: int = -1):
        self._rate = rate
        super().__init__(optimizer, last_epoch=last_epoch)

    def get_lr(self) -> list[float]:  # type: ignore[override]
        return [self._rate(self.last_epoch, base) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().state_dict().items() if key != "_rate"}


def _cosine(step: int, base: float, steps: int, floor: float) -> float:
    return floor + (base - floor) * (1 + math.cos(math.pi * step / steps)) / 2


def _warm(step: int, base: float, warmup: int, after: Callable[[int, float], float]) -> float:
    return base * (step + 1) / warmup if step < warmup else after(step - warmup, base)


class CosineAnnealingLR(torchs.CosineAnnealingLR):
    """Half a cosine from the first rate to `eta_min` over `total_steps`."""

    def __init__(
        self, optimizer: Any, total_steps: int, eta_min: float = 0, last_epoch: int = -1, **kwargs: Any
    ):
        super().__init__(optimizer, total_steps, eta_min=eta_min, last_epoch=last_epoch)


class CosineAnnealingWarmupLR(_Schedule):
    """A line up over `warmup_steps`, then half a cosine down to `eta_min` at `total_steps`."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ):
        def after(step: int, base: float) -> float:
            return _cosine(step, base, total_steps - warmup_steps, eta_min)

        super().__init__(optimizer, lambda step, base: _warm(step, base, warmup_steps, after), last_epoch)


class FlatAnnealingLR(_Schedule):
    """The first rate for a part `pct_start` of the steps, then half a cosine down to 0."""

    def __init__(
        self, optimizer: Any, total_steps: int, pct_start: float = 0.72, last_epoch: int = -1, **kwargs: Any
    ):
        flat = int(total_steps * pct_start)

        def rate(step: int, base: float) -> float:
            return base if step < flat else _cosine(step - flat, base, total_steps - flat, 0.0)

        super().__init__(optimizer, rate, last_epoch)


class FlatAnnealingWarmupLR(_Schedule):
    """A line up over `warmup_steps`, the first rate for a part of the rest, then half a cosine down to `eta_min`."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
        **kwargs: Any,
    ):
        flat = int((total_steps - warmup_steps) * pct_start)

        def after(step: int, base: float) -> float:
            anneal = total_steps - warmup_steps - flat
            return base if step < flat else _cosine(step - flat, base, anneal, eta_min)

        super().__init__(optimizer, lambda step, base: _warm(step, base, warmup_steps, after), last_epoch)


class LinearWarmupLR(_Schedule):
    """A line up over `warmup_steps`, then a line down to 0 at `total_steps`."""

    def __init__(
        self, optimizer: Any, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1, **kwargs: Any
    ):
        def rate(step: int, base: float) -> float:
            if step < warmup_steps:
                return base * (step + 1) / (warmup_steps + 1)
            return base * (total_steps - step) / (total_steps - warmup_steps)

        super().__init__(optimizer, rate, last_epoch)


class MultiStepLR(torchs.MultiStepLR):
    """The rate times `gamma` at each milestone."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ):
        super().__init__(optimizer, list(milestones or ()), gamma=gamma, last_epoch=last_epoch)


class MultiStepWarmupLR(_Schedule):
    """A line up over `warmup_steps`, then the rate times `gamma` at each milestone."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        last_epoch: int = -1,
        **kwargs: Any,
    ):
        marks = sorted(mark - warmup_steps for mark in milestones or () if mark >= warmup_steps)

        def after(step: int, base: float) -> float:
            return base * gamma ** bisect_right(marks, step)

        super().__init__(optimizer, lambda step, base: _warm(step, base, warmup_steps, after), last_epoch)


class PolynomialLR(_Schedule):
    """A power of the part of the steps that are left, down to `end_lr`."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ):
        super().__init__(
            optimizer, lambda step, base: _power(step, base, total_steps, end_lr, power), last_epoch
        )


class PolynomialWarmupLR(_Schedule):
    """A line up over `warmup_steps`, then as `PolynomialLR`."""

    def __init__(
        self,
        optimizer: Any,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 1e-4,
        power: float = 1.0,
        last_epoch: int = -1,
        **kwargs: Any,
    ):
        def after(step: int, base: float) -> float:
            return _power(step, base, total_steps - warmup_steps, end_lr, power)

        super().__init__(optimizer, lambda step, base: _warm(step, base, warmup_steps, after), last_epoch)


def _power(step: int, base: float, steps: int, end: float, power: float) -> float:
    return end + (base - end) * (1 - min(step, steps) / steps) ** power


class OneCycleLR(torchs.OneCycleLR):
    """Up to the first rate and down again, as torch's; the rate given to the optimizer is the peak."""

    def __init__(self, optimizer: Any, total_steps: int, last_epoch: int = -1, **kwargs: Any):
        peaks = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer, peaks, total_steps=total_steps, last_epoch=last_epoch, **kwargs)


class LambdaLR(torchs.LambdaLR):
    """The first rate times a function of the step."""

    def __init__(self, optimizer: Any, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1):
        super().__init__(optimizer, lr_lambda, last_epoch=last_epoch)


class MultiplicativeLR(torchs.MultiplicativeLR):
    """The rate times a function of the step at each step."""

    def __init__(self, optimizer: Any, total_steps: int, lr_lambda: Any = None, last_epoch: int = -1):
        super().__init__(optimizer, lr_lambda, last_epoch=last_epoch)


class StepLR(torchs.StepLR):
    """The rate times `gamma` every `step_size` steps."""

    def __init__(
        self, optimizer: Any, total_steps: int, step_size: int = 1, gamma: float = 0.1, last_epoch: int = -1
    ):
        super().__init__(optimizer, step_size, gamma=gamma, last_epoch=last_epoch)


class ExponentialLR(torchs.ExponentialLR):
    """The rate times `gamma` at each step."""

    def __init__(self, optimizer: Any, total_steps: int, gamma: float = 1.0, last_epoch: int = -1):
        super().__init__(optimizer, gamma, last_epoch=last_epoch)
