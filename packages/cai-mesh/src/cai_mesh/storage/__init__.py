"""Blocks of a model in chunks that come and go, and who is told of it."""

from __future__ import annotations

from cai_mesh.storage.elementwise import check_elementwise
from cai_mesh.storage.finding import blocks, check_parameters, units
from cai_mesh.storage.guards import (
    check_alone,
    check_arguments,
    check_there,
    reduces_itself,
)
from cai_mesh.storage.lifecycle import LifecycleListener, ModuleLifecycle, no_backward
from cai_mesh.storage.part_gradients import show_gradients, show_stage_gradients
from cai_mesh.storage.part_groups import PartSteps
from cai_mesh.storage.part_state import PartState, apart, guard_state
from cai_mesh.storage.residency import OnDevice, StoredShard
from cai_mesh.storage.structure import exchanged, follow_structure, is_followed
from cai_mesh.storage.unit import FlatUnit, Share

__all__ = [
    "FlatUnit",
    "LifecycleListener",
    "ModuleLifecycle",
    "OnDevice",
    "PartState",
    "PartSteps",
    "Share",
    "StoredShard",
    "apart",
    "blocks",
    "check_alone",
    "check_arguments",
    "check_elementwise",
    "check_parameters",
    "check_there",
    "exchanged",
    "follow_structure",
    "guard_state",
    "is_followed",
    "no_backward",
    "reduces_itself",
    "show_gradients",
    "show_stage_gradients",
    "units",
]
