"""1F1B (PipeDream-flush, Narayanan et al. 2021, https://arxiv.org/abs/2006.09503).

A stage runs one forward for each stage after it, then alternates one forward and one backward. The bubble is that of
GPipe, but stage `s` holds at most `stages - s` live activations, for any number of microbatches.
"""

from __future__ import annotations

from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules._arguments import check_arguments, check_one_chunk


def one_f_one_b(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stage_ranks: rank of each stage; one stage a rank, in order.
        microbatches: microbatches per step, at least 1; below the number of stages the bubble dominates.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("1f1b", stage_ranks, microbatches, rank)
    check_one_chunk("1f1b", stage_ranks)
    forwards, backwards = (
        [Action(kind, rank, m) for m in range(microbatches)] for kind in (Kind.FORWARD, Kind.BACKWARD)
    )
    return alternate(forwards, backwards, len(stage_ranks) - 1 - rank)


def alternate(forwards: list[Action], backwards: list[Action], warmup: int) -> list[Action]:
    """`warmup` forwards, then a forward and a backward in turn, then the backwards that are left."""
    actions = forwards[:warmup]
    for forward, backward in zip(forwards[warmup:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[max(len(forwards) - warmup, 0) :]
