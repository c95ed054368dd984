"""The moving average of a run's weights, sharded as its optimizer state is."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

import torch
from torch import Tensor

from cai_apps.compose.weights import MODEL, Weights
from cai_mesh.layout import BoxedTensor

AVERAGE = "average."
"""What names of the average's tensors begin with in a checkpoint."""


Pairs = tuple[list[Tensor], list[Tensor]]
"""Averages, and the weights they follow, in the same order."""


class Average:
    """An exponential moving average of the master weights (Polyak and Juditsky, 1992), of this rank's parts of them.

    After step t it moves to the weights by 1 - d, with d = min(decay, (1 + t) / (10 + t)), so that a young average
    forgets the initial weights. It starts as the weights are when it is made.

    Args:
        trained: names of the parameters that it follows.
    """

    def __init__(self, weights: Weights, decay: float, trained: Set[str]):
        self._weights, self._decay, self._trained = weights, decay, trained
        self._held = {name: _copy(boxed) for name, boxed in self._current().items()}
        self._pairs: Pairs | None = None

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights after step number `step` of the run, counted from 1."""
        share = 1 - min(self._decay, (1 + step) / (10 + step))
        if self._weights.stay:
            self._pairs = self._pairs or self._side_by_side(self._current())
            _move(self._pairs, share)
        else:
            for name, boxed in self._current().items():  # what is lent is there until something else is
                _move(self._side_by_side({name: boxed}), share)

    def restart(self) -> None:
        """Begin anew from the weights as they are."""
        for name, boxed in self._current().items():
            for average, value in zip(*self._side_by_side({name: boxed}), strict=True):
                average.copy_(value)

    def state(self) -> dict[str, BoxedTensor]:
        """Return views of the average by name, which a checkpoint is made from or loaded into."""
        return {f"{AVERAGE}{name}": boxed for name, boxed in self._held.items()}

    def values(self) -> dict[str, BoxedTensor]:
        """Return the average by the names of parameters."""
        return self._held

    def _side_by_side(self, current: dict[str, BoxedTensor]) -> Pairs:
        averages: list[Tensor] = []
        values: list[Tensor] = []
        for name, boxed in current.items():
            boxed_average, present = self._held[name], boxed.present
            for (_, average), (_, value) in zip(boxed_average.pieces, present.pieces, strict=True):
                averages.append(average)
                values.append(value.to(average.device))  # a weight may have moved to a GPU since
        return averages, values

    def _current(self) -> dict[str, BoxedTensor]:
        named = self._weights.masters()
        if named is None:
            state = self._weights.state()
            named = {
                name.removeprefix(MODEL): boxed for name, boxed in state.items() if name.startswith(MODEL)
            }
        return {name: boxed for name, boxed in named.items() if name in self._trained}


def _move(pairs: Pairs, share: float) -> None:
    averages, values = pairs
    if averages:
        torch._foreach_lerp_(averages, values, share)


def _copy(boxed: BoxedTensor) -> BoxedTensor:
    pieces = tuple((box, value.detach().clone()) for box, value in boxed.present.pieces)
    return replace(boxed, pieces=pieces, lend=None)
