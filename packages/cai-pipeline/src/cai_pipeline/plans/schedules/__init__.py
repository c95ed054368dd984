"""Schedules by name: each is a function of (rank of each stage, microbatches, rank) to a rank's compute actions."""

from __future__ import annotations

from collections.abc import Callable

from cai_mesh.errors import PlanError, did_you_mean
from cai_pipeline.plans.actions import Action, Kind, Program
from cai_pipeline.plans.placement import Held, Placement, stages_of
from cai_pipeline.plans.schedules.breadth_first import breadth_first, gpipe
from cai_pipeline.plans.schedules.controllable import v_half, v_min
from cai_pipeline.plans.schedules.dualpipe import FEWEST, dualpipe_v
from cai_pipeline.plans.schedules.interleaved import interleaved
from cai_pipeline.plans.schedules.limits import Limits
from cai_pipeline.plans.schedules.one_f_one_b import one_f_one_b
from cai_pipeline.plans.schedules.zero_bubble import zb_h1, zb_v

ScheduleFn = Callable[[Held, int, int], list[Action]]

_ROWS: dict[str, tuple[ScheduleFn, Limits]] = {
    "gpipe": (gpipe, Limits()),
    "1f1b": (one_f_one_b, Limits()),
    "interleaved": (interleaved, Limits("any")),
    "bfs": (breadth_first, Limits("any")),
    "zb-h1": (zb_h1, Limits(split=True)),
    "zb-v": (zb_v, Limits("two", split=True)),
    "v-half": (v_half, Limits("two", split=True)),
    "v-min": (v_min, Limits("two", split=True)),
    "dualpipe-v": (dualpipe_v, Limits("two", split=True, microbatches=FEWEST)),
}
SCHEDULES: dict[str, ScheduleFn] = {name: function for name, (function, _) in _ROWS.items()}
LIMITS = {name: limits for name, (_, limits) in _ROWS.items()} | {"auto": Limits("any", split=True)}
"""Limits of the schedules, and of "auto", which is one of them first and ordered anew then."""


def limits_of(schedule: str) -> Limits:
    """The limits of a schedule of SCHEDULES, or of "auto". Raises `PlanError` for an unknown name."""
    if schedule not in LIMITS:
        raise PlanError(f"unknown schedule {schedule!r}", got=schedule, fix=did_you_mean(schedule, LIMITS))
    return LIMITS[schedule]


def placement_of(schedule: str, chunks: int = 1) -> Placement:
    """The placement of stages under a schedule of SCHEDULES or "auto": two chunks that it may order freely lie in a V,
    where the first rank has the last stage too and begins its backwards at once."""
    two = schedule in LIMITS and LIMITS[schedule].stages == "two"
    return "v" if two or (schedule == "auto" and chunks == 2) else "loop"


def program(schedule: str, held: Held, microbatches: int) -> Program:
    """The compute actions of all ranks under a schedule of SCHEDULES.

    Args:
        schedule: name, e.g. "1f1b".
        held: rank of each stage, as from `place(ranks, chunks)`.
        microbatches: microbatches per step.

    Raises:
        PlanError: the name is unknown, or the schedule does not take these numbers or this placement.
    """
    if schedule not in SCHEDULES:
        raise PlanError(f"unknown schedule {schedule!r}", got=schedule, fix=did_you_mean(schedule, SCHEDULES))
    return [SCHEDULES[schedule](held, microbatches, rank) for rank in range(max(held, default=-1) + 1)]


def begin_with(schedule: str, held: Held, microbatches: int) -> Program:
    """The compute actions of all ranks under a schedule of SCHEDULES, or those that "auto" measures.

    The latter are those of a named schedule for this placement that takes the memory of 1F1B, with every backward
    split. Arguments and errors as of `program`.
    """
    if schedule != "auto":
        return program(schedule, held, microbatches)
    for name in ("1f1b", "interleaved", "zb-v"):
        try:
            named_program = program(name, held, microbatches)
        except PlanError:
            continue
        return [[part for action in actions for part in _halves(action)] for actions in named_program]
    raise PlanError("no schedule takes this placement of stages", got=f"stages on ranks {list(held)}")


def _halves(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return tuple(
        Action(kind, action.stage, action.microbatch) for kind in (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )


def forward_only(stage_ranks: Held, microbatches: int) -> Program:
    """The compute actions of an evaluation: every microbatch through every stage, as many at a time as there are ranks.

    Args:
        stage_ranks: rank of each stage.
        microbatches: any number.
    """
    ranks = max(stage_ranks) + 1
    rounds = [range(at, min(at + ranks, microbatches)) for at in range(0, microbatches, ranks)]
    return [
        [
            Action(Kind.FORWARD, stage, m)
            for of_round in rounds
            for stage in stages_of(stage_ranks, rank)
            for m in of_round
        ]
        for rank in range(ranks)
    ]
