"""Plans what stays on the device and what goes to a disk: pure functions of sizes, a trace and rates.

Names load their file on first use: `trace`, `policy`, `simulation` and `tiers` need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cai_gemini.planning.budget import check_device, least_device
    from cai_gemini.planning.disk_plan import choose, chunk_bytes, disk_bytes, host_bytes
    from cai_gemini.planning.simulation import Rates
    from cai_gemini.planning.tiers import RESIDENCIES, Tiers

_HOMES = {
    "RESIDENCIES": "tiers",
    "Rates": "simulation",
    "Tiers": "tiers",
    "check_device": "budget",
    "choose": "disk_plan",
    "chunk_bytes": "disk_plan",
    "disk_bytes": "disk_plan",
    "host_bytes": "disk_plan",
    "least_device": "budget",
}

__all__ = [
    "RESIDENCIES",
    "Rates",
    "Tiers",
    "check_device",
    "choose",
    "chunk_bytes",
    "disk_bytes",
    "host_bytes",
    "least_device",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'cai_gemini.planning' has no attribute {name!r}")
    return getattr(importlib.import_module(f"cai_gemini.planning.{_HOMES[name]}"), name)
