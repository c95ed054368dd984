"""The argument checks that schedules share."""

from __future__ import annotations

from cai_mesh.errors import PlanError
from cai_pipeline.plans.placement import Held, place


def check_arguments(name: str, held: Held, microbatches: int, rank: int) -> None:
    """Raise PlanError unless there is something to do, and `rank` is one of those that hold stages."""
    if not held or microbatches < 1:
        raise PlanError(
            f"schedule {name!r} has nothing to do",
            got=f"{len(held)} stages, {microbatches} microbatches",
            expected="at least 1 of each",
        )
    if rank not in held:
        raise PlanError(f"schedule {name!r} has no such rank", got=rank, expected=f"0 to {max(held)}")


def chunks_in_a_loop(name: str, held: Held) -> int:
    """Stages of each rank. Raises PlanError where they are not placed in a loop."""
    ranks = max(held) + 1
    chunks, left = divmod(len(held), ranks)
    if left or held != place(ranks, chunks):
        raise PlanError(
            f"schedule {name!r} takes stages in a loop", got=held, expected="stage s on rank s % ranks"
        )
    return chunks


def check_one_chunk(name: str, held: Held) -> None:
    """Raise PlanError unless each rank has one stage, in order."""
    if held != tuple(range(len(held))):
        raise PlanError(
            f"schedule {name!r} takes one chunk per rank",
            got=f"{len(held) // (max(held) + 1)} chunks",
            expected="1",
            fix='use the schedule "interleaved" or "bfs"',
        )


def check_v(name: str, held: Held) -> None:
    """Raise PlanError unless each rank has two stages, in a V."""
    if held != place(max(held) + 1, 2, "v"):
        raise PlanError(
            f"schedule {name!r} takes two chunks per rank, in a V",
            got=f"stages on ranks {list(held)}",
            fix='call split(model, mesh, chunks=2, placement="v")',
        )
