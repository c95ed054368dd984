"""Pipeline parallelism: split a model into stages, and run schedules that are lists of actions.

Rooms: `plans`, which loads no torch, `stages`, `run`. Names that need torch load it on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from cai_pipeline import plans
from cai_pipeline.plans import (
    SCHEDULES,
    Action,
    Costs,
    Kind,
    Timeline,
    begin_with,
    check,
    draw,
    from_csv,
    lower,
    place,
    placement_of,
    program,
    search,
    simulate,
    to_csv,
)

if TYPE_CHECKING:
    from cai_mesh.trial import Trial
    from cai_pipeline.run.executor import Observers, PipelineRunner
    from cai_pipeline.stages.placeholders import Placeholder
    from cai_pipeline.stages.split import split
    from cai_pipeline.stages.stage import Companion, Stages, accompany, run_stage

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Action",
    "Companion",
    "Costs",
    "Kind",
    "Observers",
    "PipelineRunner",
    "Placeholder",
    "Stages",
    "Timeline",
    "Trial",
    "accompany",
    "begin_with",
    "check",
    "draw",
    "from_csv",
    "lower",
    "place",
    "placement_of",
    "plans",
    "program",
    "run_stage",
    "search",
    "simulate",
    "split",
    "to_csv",
]

_HOMES = {
    "Companion": "cai_pipeline.stages.stage",
    "Observers": "cai_pipeline.run.executor",
    "PipelineRunner": "cai_pipeline.run.executor",
    "Placeholder": "cai_pipeline.stages.placeholders",
    "Stages": "cai_pipeline.stages.stage",
    "Trial": "cai_mesh.trial",
    "accompany": "cai_pipeline.stages.stage",
    "run_stage": "cai_pipeline.stages.stage",
    "split": "cai_pipeline.stages.split",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'cai_pipeline' has no attribute {name!r}")
