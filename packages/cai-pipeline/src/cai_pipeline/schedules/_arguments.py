"""The argument checks that schedules share."""

from __future__ import annotations

from cai_mesh.errors import PlanError


def check_arguments(name: str, stages: int, microbatches: int, rank: int, chunks: int) -> None:
    """Raise PlanError unless the arguments are those of a schedule with one chunk per rank."""
    if stages < 1 or microbatches < 1:
        raise PlanError(
            f"schedule {name!r} has nothing to do",
            got=f"{stages} stages, {microbatches} microbatches",
            expected="at least 1 of each",
        )
    if not 0 <= rank < stages:
        raise PlanError(f"schedule {name!r} has no such rank", got=rank, expected=f"0 to {stages - 1}")
    if chunks != 1:
        raise PlanError(f"schedule {name!r} takes one chunk per rank", got=chunks, expected=1)
