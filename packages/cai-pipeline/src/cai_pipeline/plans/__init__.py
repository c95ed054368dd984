"""Schedules as lists of actions: they are made, proven, simulated and drawn here, without torch."""

from __future__ import annotations

from cai_pipeline.plans import draw
from cai_pipeline.plans.actions import Action, Kind, Program
from cai_pipeline.plans.checker import check
from cai_pipeline.plans.csv_text import from_csv, to_csv
from cai_pipeline.plans.lowering import lower
from cai_pipeline.plans.placement import place
from cai_pipeline.plans.scheduler import Costs, search
from cai_pipeline.plans.schedules import SCHEDULES, begin_with, limits_of, placement_of, program
from cai_pipeline.plans.simulation import Timeline, simulate

__all__ = [
    "SCHEDULES",
    "Action",
    "Costs",
    "Kind",
    "Program",
    "Timeline",
    "begin_with",
    "check",
    "draw",
    "from_csv",
    "limits_of",
    "lower",
    "place",
    "placement_of",
    "program",
    "search",
    "simulate",
    "to_csv",
]
