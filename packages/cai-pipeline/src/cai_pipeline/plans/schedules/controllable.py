"""V-Min and V-Half: a third and half of the activations of 1F1B (Qi et al. 2024, https://arxiv.org/abs/2405.15362).

The stages lie in a V, two a rank. A *block* says when each rank begins the six actions of one microbatch: forward,
gradient of the input and gradient of the weights, of either stage. Each takes one unit of time; the next microbatch
follows six later, so a rank is always busy if no two of its actions fall on one unit, modulo six. What a rank holds at
a time is how long a block lasts on it, divided by six; so it depends on by how much the four passes shift from one rank
to the next. Shifts of one unit give V-Min. Those of V-Half add up to six; of all that repeat after two ranks they lead
to the shortest step, by trying them for 4, 5, 8 and 9 ranks. The list of a rank's actions is the order of its block's
copies, so what a real pass takes does not matter for memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate, permutations, product

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules._arguments import check_arguments, check_v

PERIOD = 6
Shifts = tuple[int, int, int, int]
"""Units by which a pass shifts from a rank to the next: forward of its first stage, of its second, gradient of the
input of its second stage, of its first."""
V_MIN: tuple[Shifts, ...] = ((1, 1, 1, 1),)
V_HALF: tuple[Shifts, ...] = ((2, 2, 1, 1), (1, 1, 2, 2))
"""The shifts from even ranks to the next, and from odd ones."""
Starts = tuple[int, int, int, int]
"""The units in which a rank begins those four passes of microbatch 0."""


def v_min(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank. It holds what about a third as many microbatches keep as ranks.

    Args:
        stage_ranks: rank of each stage; two a rank, in a V.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    return _repeated("v-min", V_MIN, stage_ranks, microbatches, rank)


def v_half(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """Like `v_min`; holds what about half as many microbatches keep as ranks, and waits less."""
    return _repeated("v-half", V_HALF, stage_ranks, microbatches, rank)


def _repeated(
    name: str, shifts: tuple[Shifts, ...], stage_ranks: Held, microbatches: int, rank: int
) -> list[Action]:
    check_arguments(name, stage_ranks, microbatches, rank)
    check_v(name, stage_ranks)
    down, up = rank, len(stage_ranks) - 1 - rank
    starts = _block(len(stage_ranks) // 2, shifts)[rank]
    up_w, down_w = _weights(starts)
    passes = (
        (starts[0], Kind.FORWARD, down),
        (starts[1], Kind.FORWARD, up),
        (starts[2], Kind.BACKWARD_INPUT, up),
        (starts[3], Kind.BACKWARD_INPUT, down),
        (up_w, Kind.BACKWARD_WEIGHT, up),
        (down_w, Kind.BACKWARD_WEIGHT, down),
    )
    timed = [
        (start + PERIOD * m, Action(kind, stage, m))
        for m in range(microbatches)
        for start, kind, stage in passes
    ]
    return [action for _, action in sorted(timed, key=lambda timed_action: timed_action[0])]


@cache
def _block(ranks: int, shifts: tuple[Shifts, ...]) -> Sequence[Starts]:
    """The shortest block of these shifts: of each rank, when it begins its four passes."""
    rank_shifts = [shifts[rank % len(shifts)] for rank in range(ranks - 1)]
    forward, up, back, down = (
        list(accumulate((step[i] for step in rank_shifts), initial=0)) for i in range(4)
    )
    for waits in sorted(product(range(1, PERIOD + 2), repeat=3), key=sum):
        up_f = [forward[-1] + waits[0] + up[-1] - shift for shift in up]
        up_i = [up_f[0] + waits[1] + shift for shift in back]
        down_i = [up_i[-1] + waits[2] + down[-1] - shift for shift in down]
        starts = list(zip(forward, up_f, up_i, down_i, strict=True))
        if all(len({start % PERIOD for start in of_rank}) == len(of_rank) for of_rank in starts):
            return starts
    raise PlanError("no block has these shifts", got=str(shifts))


def _weights(starts: Starts) -> tuple[int, int]:
    """The units in which the gradients of weights begin, of the second stage and the first: free ones, soon after."""
    free = set(range(PERIOD)) - {start % PERIOD for start in starts}
    _, _, up_i, down_i = starts

    def after(start: int, unit: int) -> int:
        return start + 1 + (unit - start - 1) % PERIOD

    choices = [(after(up_i, first), after(down_i, second)) for first, second in permutations(sorted(free))]
    return min(choices, key=sum)
