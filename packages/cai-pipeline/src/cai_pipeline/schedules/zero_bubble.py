"""ZB-H1 (Qi et al. 2023, https://arxiv.org/abs/2401.10241): 1F1B whose backwards are split in two.

The gradient of a stage's input goes on at once; that of its weights waits, on rank `r` for `r` microbatches, and fills
what would be bubble at the end of a step. With `p` ranks and at least `p` microbatches of `F`, `I` and `W` seconds, all
alike, a step takes `m (F + I + W) + (p - 1) (F + I - W)`: a third of the bubble of 1F1B is left. Every rank holds
what `p` microbatches keep, as the first of 1F1B does; a microbatch that waits for `W` keeps less than a whole one.
"""

from __future__ import annotations

from cai_pipeline.actions import Action, Kind
from cai_pipeline.placement import Held
from cai_pipeline.schedules._arguments import check_arguments, check_one_chunk


def zb_h1(held: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank.

    Args:
        held: rank of each stage; one stage a rank, in order.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("zb-h1", held, microbatches, rank)
    check_one_chunk("zb-h1", held)
    warmup = min(len(held) - 1 - rank, microbatches)
    actions = [Action(Kind.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches):
        if m + warmup < microbatches:
            actions.append(Action(Kind.FORWARD, rank, m + warmup))
        actions.append(Action(Kind.BACKWARD_INPUT, rank, m))
        if m >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, rank, m - rank))
    waiting = range(max(microbatches - rank, 0), microbatches)
    return actions + [Action(Kind.BACKWARD_WEIGHT, rank, m) for m in waiting]
