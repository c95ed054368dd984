"""Interleaved 1F1B (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473): several stages a rank, in a loop.

Microbatches go through the chunks in rounds: a rank runs the microbatches of a round through its first chunk, then
through its second, and so on. A rank starts its first backward after the forwards that the way to the last stage and
back takes. With `p` ranks, `v` chunks and `m` microbatches, a multiple of `p`, the bubble is (p - 1) / (v m + p - 1): a
`v`-th of that of 1F1B, for `v` times as many transfers and more live activations.

Rounds have `p` microbatches where those divide, else as many more as are left over, as evenly as can be.
"""

from __future__ import annotations

from itertools import pairwise

from cai_pipeline.plans.actions import Action, Kind
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.schedules._arguments import check_arguments, chunks_in_a_loop
from cai_pipeline.plans.schedules.one_f_one_b import alternate, one_f_one_b


def interleaved(stage_ranks: Held, microbatches: int, rank: int) -> list[Action]:
    """The compute actions of one rank; with one chunk a rank those of 1F1B.

    Args:
        stage_ranks: rank of each stage, in a loop.
        microbatches: microbatches per step, at least 1.
        rank: pipeline rank.

    Raises:
        PlanError: an argument is out of range.
    """
    check_arguments("interleaved", stage_ranks, microbatches, rank)
    chunks = chunks_in_a_loop("interleaved", stage_ranks)
    if chunks == 1:
        return one_f_one_b(stage_ranks, microbatches, rank)
    ranks = len(stage_ranks) // chunks
    rounds = _rounds(microbatches, ranks)

    def order(kind: Kind, passes: range) -> list[Action]:
        return [
            Action(kind, chunk * ranks + rank, m) for of_round in rounds for chunk in passes for m in of_round
        ]

    forwards = order(Kind.FORWARD, range(chunks))
    backwards = order(Kind.BACKWARD, range(chunks)[::-1])
    warmup = 2 * (ranks - 1 - rank) + (chunks - 1) * len(rounds[0])
    return alternate(forwards, backwards, warmup)


def _rounds(microbatches: int, ranks: int) -> list[range]:
    """Consecutive microbatches, `ranks` or more in each round; the first rounds are the larger ones."""
    count = max(1, microbatches // ranks)
    size, larger = divmod(microbatches, count)
    starts = [index * size + min(index, larger) for index in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]
