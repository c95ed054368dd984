"""All forwards, then all backwards, a stage at a time.

With one stage a rank this is GPipe (Huang et al. 2019, https://arxiv.org/abs/1811.06965), with several the schedule
of Lamy-Poirier 2022 (https://arxiv.org/abs/2211.05953): a rank runs all microbatches through its first stage before it
begins with the next, so the parameters of a stage are gathered and its gradients reduced once a step, while other
stages compute. After the last forward every microbatch is live on every stage.

The backwards run in the order of the forwards, so gradients accumulate in the same order as in a plain loop.
"""

from __future__ import annotations

from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held, stages_of
from cai_pipeline.plans.schedules._arguments import check_arguments, check_one_chunk


def breadth_first(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank, wherever its stages are.

    Args:
        stage_ranks: rank of each stage.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("bfs", stage_ranks, microbatches, rank)
    local_stages = stages_of(stage_ranks, rank)
    forwards = [Action(Kind.FORWARD, stage, m) for stage in local_stages for m in range(microbatches)]
    return forwards + [
        Action(Kind.BACKWARD, stage, m) for stage in local_stages[::-1] for m in range(microbatches)
    ]


def gpipe(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """As `breadth_first`, for one stage a rank."""
    check_arguments("gpipe", stage_ranks, microbatches, rank)
    check_one_chunk("gpipe", stage_ranks)
    return breadth_first(stage_ranks, microbatches, rank)
