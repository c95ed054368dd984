"""GPipe (Huang et al. 2019, https://arxiv.org/abs/1811.06965): all forwards, then all backwards.

After the last forward every microbatch is live, so a stage holds `microbatches` activations. The backwards run in the
order of the forwards, so gradients accumulate in the same order as in a plain loop.
"""

from __future__ import annotations

from cai_pipeline.actions import Action, Kind
from cai_pipeline.schedules._arguments import check_arguments


def gpipe(stages: int, microbatches: int, rank: int, chunks: int = 1) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stages: number of stages, which is the number of pipeline ranks.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank, 0 <= rank < stages.
        chunks: stages per rank; this schedule has 1.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("gpipe", stages, microbatches, rank, chunks)
    return [Action(kind, rank, m) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(microbatches)]
