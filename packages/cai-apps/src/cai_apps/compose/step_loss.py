"""The loss of a microbatch as a runner takes it, and how many of its targets a model predicts right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cai_apps.compose.routing.balance import Balance
from cai_apps.compose.workload import Loss, Workload
from cai_zero import LossScale


class Evaluation(NamedTuple):
    """What a model's predictions of some microbatches are worth, of one data rank, on every rank of its pipeline."""

    loss: Tensor
    """A float64 scalar: the loss divided by `total`."""
    correct: Tensor | None
    """A float64 scalar: targets that are the likeliest of all; None: the workload's targets are not such."""
    measures: Tensor | None = None
    """What the loss measures beside, float64 [2, names]: numerators and denominators; None: nothing."""


class StepLoss:
    """A `LossFn` of a pipeline's runner: (output, (target, total)) -> the loss divided by `total`, and scaled.

    Args:
        loss: the loss, summed over a microbatch.
        workload: the workload, which knows whether predictions can be right.
        scale: the scale of the loss, with float16.
        balance: the routers, whose losses add their gradients and not their values; None: there are none.
    """

    def __init__(
        self, loss: Loss, workload: Workload, scale: LossScale | None, balance: Balance | None = None
    ):
        self.loss, self._workload, self._scale, self._balance = loss, workload, scale, balance
        self._correct: Tensor | None = None
        self._measures: Tensor | None = None

    def __call__(self, output: Any, target: tuple[Any, Tensor | float]) -> Tensor:
        expected, total = target
        if self._correct is not None and self._workload.correct is not None:
            self._correct += self._workload.correct(self.loss, output, expected)
        partial_loss = self._summed(output, expected) / total
        of_routers = None if self._balance is None else self._balance.term()
        if of_routers is not None:
            partial_loss = partial_loss + (of_routers - of_routers.detach()).to(partial_loss.dtype)
        return partial_loss if self._scale is None else self._scale.scale(partial_loss)

    def _summed(self, output: Any, expected: Any) -> Tensor:
        """Return the loss of a microbatch, and add up what it measures beside."""
        if self._measures is None:
            return self.loss(output, expected)
        loss, measures = self.loss.measured(output, expected)  # type: ignore[attr-defined]
        self._measures += measures
        return loss

    @contextmanager
    def measuring(self, device: torch.device) -> Iterator[Tensor | None]:
        """Add up what the loss measures, float64 [2, names], 0 without a last stage; None where it measures nothing."""
        if not self._workload.measures:
            yield None
            return
        names = len(self._workload.measures)
        self._measures = torch.zeros(2, names, dtype=torch.float64, device=device)
        try:
            yield self._measures
        finally:
            self._measures = None

    @contextmanager
    def counting(self, device: torch.device) -> Iterator[Tensor | None]:
        """Add up right predictions into a float64 scalar, 0 without a last stage; None where nothing can be right."""
        if self._workload.correct is None:
            yield None
            return
        self._correct = torch.zeros((), dtype=torch.float64, device=device)
        try:
            yield self._correct
        finally:
            self._correct = None
