"""ZB-H1 and ZB-V (Qi et al. 2023, https://arxiv.org/abs/2401.10241): backwards are split in two.

**ZB-H1** is 1F1B so, one stage a rank. The gradient of a stage's input goes on at once; that of its weights waits, on
rank `r` for `r` microbatches, and fills what would be bubble at the end of a step. With `p` ranks and at least `p`
microbatches of `F`, `I` and `W` seconds, all alike, a step takes `m (F + I + W) + (p - 1) (F + I - W)`: a third of the
bubble of 1F1B is left. Every rank holds what `p` microbatches keep, as the first of 1F1B does; a microbatch that waits
for `W` keeps less than a whole one.

**ZB-V** has two stages a rank in a V: the first rank holds the first stage and the last, so backwards begin where they
end. With `F`, `I` and `W` of a stage alike, and at least `2 p - 1` microbatches, no rank waits after its first action:
a step takes `2 m (F + I + W) + (p - 1) F`. Every rank holds what `p` microbatches keep, as the first of 1F1B does.
"""

from __future__ import annotations

from collections import Counter

from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules._arguments import check_arguments, check_one_chunk, check_v

PARTS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
Step = tuple[Kind, int]
"""The kind of an action, and its stage."""


def zb_h1(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stage_ranks: rank of each stage; one stage a rank, in order.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("zb-h1", stage_ranks, microbatches, rank)
    check_one_chunk("zb-h1", stage_ranks)
    warmup = min(len(stage_ranks) - 1 - rank, microbatches)
    actions = [Action(Kind.FORWARD, rank, m) for m in range(warmup)]
    for m in range(microbatches):
        if m + warmup < microbatches:
            actions.append(Action(Kind.FORWARD, rank, m + warmup))
        actions.append(Action(Kind.BACKWARD_INPUT, rank, m))
        if m >= rank:
            actions.append(Action(Kind.BACKWARD_WEIGHT, rank, m - rank))
    waiting = range(max(microbatches - rank, 0), microbatches)
    return actions + [Action(Kind.BACKWARD_WEIGHT, rank, m) for m in waiting]


def zb_v(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank.

    Args:
        stage_ranks: rank of each stage; two a rank, in a V.
        microbatches: microbatches per step, at least 1; below `2 p - 1` there are bubbles.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("zb-v", stage_ranks, microbatches, rank)
    check_v("zb-v", stage_ranks)
    ranks = len(stage_ranks) // 2
    ranks, up = len(stage_ranks) // 2, len(stage_ranks) - 1 - rank
    most, below = max(microbatches, 2 * ranks - 1), ranks - rank
    down_f, down_i, down_w = ((kind, rank) for kind in PARTS)
    up_f, up_i, up_w = ((kind, up) for kind in PARTS)
    order = [down_f] * (2 * below - 1) + [up_f, down_f] * rank + [up_f, up_i, up_w] * below
    for number in range(most - ranks):
        begun = 2 * ranks - 1 - rank + number
        order += [down_f] * (begun < most) + [down_i, down_w, up_f, up_i, up_w]
    order += [down_i, up_i] * rank + [down_i, down_w] * below + [up_w] * rank + [down_w] * rank
    return _numbered(order, microbatches)


def _numbered(order: list[Step], microbatches: int) -> list[Action]:
    """Steps with microbatches in order, without those of microbatches that are not there."""
    done: Counter[Step] = Counter()
    actions = []
    for kind, stage in order:
        actions.append(Action(kind, stage, done[kind, stage]))
        done[kind, stage] += 1
    return [action for action in actions if action.microbatch is None or action.microbatch < microbatches]
