"""1F1B (PipeDream-flush, Narayanan et al. 2021, https://arxiv.org/abs/2006.09503).

A stage runs one forward for each stage after it, then alternates one forward and one backward. The bubble is that of
GPipe, but stage `s` holds at most `stages - s` live activations, for any number of microbatches.
"""

from __future__ import annotations

from cai_pipeline.actions import Action, Kind
from cai_pipeline.schedules._arguments import check_arguments


def one_f_one_b(stages: int, microbatches: int, rank: int, chunks: int = 1) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stages: number of stages, which is the number of pipeline ranks.
        microbatches: microbatches per step, at least 1; below `stages` the bubble dominates.
        rank: pipeline rank, 0 <= rank < stages.
        chunks: stages per rank; this schedule has 1.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("1f1b", stages, microbatches, rank, chunks)
    warmup = min(stages - 1 - rank, microbatches)
    actions = [Action(Kind.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches):
        if m + warmup < microbatches:
            actions.append(Action(Kind.FORWARD, rank, m + warmup))
        actions.append(Action(Kind.BACKWARD, rank, m))
    return actions
