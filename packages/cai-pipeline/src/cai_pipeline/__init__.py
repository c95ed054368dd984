"""Pipeline parallelism: split a model into stages, and run schedules that are lists of actions."""

from __future__ import annotations

from cai_mesh.trial import Trial
from cai_pipeline import draw
from cai_pipeline.actions import Action, Kind
from cai_pipeline.auto import begin_with
from cai_pipeline.check import check
from cai_pipeline.csv_text import from_csv, to_csv
from cai_pipeline.executor import Observers, PipelineRunner
from cai_pipeline.lower import lower
from cai_pipeline.placement import place
from cai_pipeline.schedules import SCHEDULES, placement_of, program
from cai_pipeline.search import Costs, search
from cai_pipeline.simulate import simulate
from cai_pipeline.split import split
from cai_pipeline.stage import Stages, run_stage

__version__ = "0.1.0"

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Observers",
    "PipelineRunner",
    "Stages",
    "Trial",
    "begin_with",
    "check",
    "draw",
    "from_csv",
    "lower",
    "place",
    "placement_of",
    "program",
    "run_stage",
    "search",
    "simulate",
    "split",
    "to_csv",
]
