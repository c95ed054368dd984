"""The division of layers into stages: contiguous layers, with the cost of the costliest stage, or rank, minimal."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from cai_mesh.errors import PlanError

LOOKUP_COST = 0.125
"""Cost of one embedding parameter; a parameter of a matrix product costs 1. A lookup computes nothing, but its
gradient and its update still read and write memory."""


def balance_layers(
    costs: Sequence[float], stages: int, *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Divide layers into contiguous stages so that the cost of the costliest stage is minimal.

    Args:
        costs: cost of each layer, in any unit, not negative.
        stages: number of stages; each gets at least one layer.
        first: cost of what the first stage has besides its layers (embeddings).
        last: cost of what the last stage has besides its layers (final norm and head).

    Returns:
        the layers of each stage. Among equally good divisions, the one with the smallest sum of squared costs.

    Raises:
        PlanError: there are fewer layers than stages.
    """
    check_enough_layers(len(costs), stages)
    total = [0.0, *itertools.accumulate(costs)]
    layers = len(costs)
    # best[end]: (slowest stage, sum of squares, starts) of layers [0, end) on the stages so far
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for stage in range(stages):
        extra = (first if stage == 0 else 0.0) + (last if stage == stages - 1 else 0.0)
        remaining = stages - 1 - stage
        ends = range(stage + 1, layers - remaining + 1) if remaining else (layers,)
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for end in ends:
            options = []
            for start, (slowest, squares, starts) in best.items():
                if start < end:
                    cost = total[end] - total[start] + extra
                    options.append((max(slowest, cost), squares + cost * cost, (*starts, start)))
            following[end] = min(options)
        best = following
    bounds = (*best[layers][2], layers)
    return [range(start, end) for start, end in itertools.pairwise(bounds)]


def balance_ranks(
    costs: Sequence[float], stage_ranks: Sequence[int], *, first: float = 0.0, last: float = 0.0
) -> list[range]:
    """Like `balance_layers`, but what counts most is the rank whose stages together cost most.

    From the division into even stages, layers move over the boundary that lowers this most, one at a time, until none
    does. Ranks of one stage each keep the even stages.

    Args:
        stage_ranks: rank of each stage.
    """
    division = balance_layers(costs, len(stage_ranks), first=first, last=last)
    extra = [0.0] * len(stage_ranks)
    extra[0] += first
    extra[-1] += last

    def worst(stages: Sequence[range]) -> tuple[float, float]:
        of_stages = [sum(costs[i] for i in stage) + more for stage, more in zip(stages, extra, strict=True)]
        of_ranks = [0.0] * (max(stage_ranks) + 1)
        for rank, cost in zip(stage_ranks, of_stages, strict=True):
            of_ranks[rank] += cost
        return max(of_ranks), sum(cost**2 for cost in of_stages)

    while True:
        best = min(_moved(division), key=worst, default=division)
        if worst(best) >= worst(division):
            return division
        division = best


def _moved(stages: Sequence[range]) -> Iterator[list[range]]:
    """All divisions in which one layer is on the other side of a boundary."""
    for index, (earlier, later) in enumerate(itertools.pairwise(stages)):
        for bound in (earlier.stop - 1, earlier.stop + 1):
            if earlier.start < bound < later.stop:
                moved = [range(earlier.start, bound), range(bound, later.stop)]
                yield [*stages[:index], *moved, *stages[index + 2 :]]


def explicit_layers(counts: Sequence[int], layers: int, stages: int) -> list[range]:
    """Stages of `counts` layers each, in order. Raises PlanError when `counts` does not fit `layers` and `stages`."""
    if len(counts) != stages or sum(counts) != layers or min(counts, default=0) < 1:
        raise PlanError(
            "the given balance does not divide the layers over the stages",
            got=list(counts),
            expected=f"{stages} positive numbers that add up to {layers}",
        )
    return [range(end - count, end) for end, count in zip(itertools.accumulate(counts), counts, strict=True)]


def check_enough_layers(layers: int, stages: int) -> None:
    """Raise PlanError when some stage would have no layer."""
    if layers < stages:
        raise PlanError(
            "the model has fewer layers than there are pipeline stages",
            got=f"{layers} layers, {stages} stages",
            expected="at least one layer per stage",
            fix=f"use a pipeline degree of at most {layers}, or a deeper model",
        )
