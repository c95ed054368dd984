"""Schedules by name: each is a function of (stages, microbatches, rank, chunks) to a rank's compute actions."""

from __future__ import annotations

from collections.abc import Callable

from cai_mesh.errors import PlanError, did_you_mean
from cai_pipeline.actions import Action, Kind, Program
from cai_pipeline.schedules.gpipe import gpipe
from cai_pipeline.schedules.one_f_one_b import one_f_one_b

ScheduleFn = Callable[[int, int, int, int], list[Action]]

SCHEDULES: dict[str, ScheduleFn] = {"gpipe": gpipe, "1f1b": one_f_one_b}


def program(schedule: str, stages: int, microbatches: int, chunks: int = 1) -> Program:
    """The compute actions of all ranks under a schedule of SCHEDULES.

    Args:
        schedule: name, e.g. "1f1b".
        stages: stages over all ranks; each rank holds `chunks` of them.
        microbatches: microbatches per step.
        chunks: stages per rank.

    Raises:
        PlanError: the name is unknown, or the schedule does not take these numbers.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"unknown schedule {schedule!r}", got=schedule, fix=did_you_mean(schedule, SCHEDULES))
    if chunks < 1 or stages % chunks:
        raise PlanError("stages do not divide into chunks", got=f"{stages} stages, {chunks} chunks per rank")
    return [SCHEDULES[schedule](stages, microbatches, rank, chunks) for rank in range(stages // chunks)]


def forward_only(stages: int, microbatches: int) -> Program:
    """The compute actions of an evaluation: every microbatch through every stage, one stage per rank."""
    return [[Action(Kind.FORWARD, stage, m) for m in range(microbatches)] for stage in range(stages)]
