"""The argument checks that schedules share."""

from __future__ import annotations

from cai_mesh.errors import PlanError
from cai_pipeline.plans.placement import Held, place


def check_arguments(name: str, stage_ranks: Held, microbatches: int, rank: int) -> None:
    """Raise PlanError unless there is something to do, and `rank` is one of those that hold stages."""
    if not stage_ranks or microbatches < 1:
        raise PlanError(
            f"schedule {name!r} has nothing to do",
            got=f"{len(stage_ranks)} stages, {microbatches} microbatches",
            expected="at least 1 of each",
        )
    if rank not in stage_ranks:
        raise PlanError(f"schedule {name!r} has no such rank", got=rank, expected=f"0 to {max(stage_ranks)}")


def chunks_in_a_loop(name: str, stage_ranks: Held) -> int:
    """Stages of each rank. Raises PlanError where they are not placed in a loop."""
    ranks = max(stage_ranks) + 1
    chunks, remainder = divmod(len(stage_ranks), ranks)
    if remainder or stage_ranks != place(ranks, chunks):
        raise PlanError(
            f"schedule {name!r} takes stages in a loop", got=stage_ranks, expected="stage s on rank s % ranks"
        )
    return chunks


def check_one_chunk(name: str, stage_ranks: Held) -> None:
    """Raise PlanError unless each rank has one stage, in order."""
    if stage_ranks != tuple(range(len(stage_ranks))):
        raise PlanError(
            f"schedule {name!r} takes one chunk per rank",
            got=f"{len(stage_ranks) // (max(stage_ranks) + 1)} chunks",
            expected="1",
            fix='use the schedule "interleaved" or "bfs"',
        )


def check_v(name: str, stage_ranks: Held) -> None:
    """Raise PlanError unless each rank has two stages, in a V."""
    if stage_ranks != place(max(stage_ranks) + 1, 2, "v"):
        raise PlanError(
            f"schedule {name!r} takes two chunks per rank, in a V",
            got=f"stages on ranks {list(stage_ranks)}",
            fix='call split(model, mesh, chunks=2, placement="v")',
        )
