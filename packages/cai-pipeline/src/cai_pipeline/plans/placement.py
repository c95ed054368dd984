"""The placement of stages on ranks, as a tuple: the rank of each stage, in order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

from cai_mesh.errors import PlanError, did_you_mean

Held = tuple[int, ...]
"""The rank of each stage."""
Placement = Literal["loop", "v"]
"""loop: stage s on rank s % ranks, so the last rank hands on to the first. v: down the ranks and up again, so two
neighbouring stages meet on the last rank, and the first rank holds the first stage and the last."""


def place(ranks: int, chunks: int = 1, placement: Placement = "loop") -> Held:
    """The rank of each of `ranks * chunks` stages.

    Raises:
        PlanError: no such placement, or a V of other than 1 or 2 chunks.
    """
    if placement not in get_args(Placement):
        raise PlanError(
            f"unknown placement {placement!r}", fix=did_you_mean(str(placement), get_args(Placement))
        )
    if ranks < 1 or chunks < 1:
        raise PlanError(
            "there are no stages", got=f"{ranks} ranks, {chunks} chunks", expected="at least 1 of each"
        )
    if placement == "v" and chunks > 2:
        raise PlanError("a V has two chunks on each rank", got=f"{chunks} chunks", expected="2")
    down = tuple(range(ranks))
    return down + down[::-1] if placement == "v" and chunks == 2 else down * chunks


def stages_of(stage_ranks: Sequence[int], rank: int) -> tuple[int, ...]:
    """The stages of a rank, in order."""
    return tuple(stage for stage, holder in enumerate(stage_ranks) if holder == rank)
