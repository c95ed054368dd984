"""The schedule of a pipeline in the form of a V, which is made here by the plugin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__all__ = ["PipelineGraph", "ScheduledNode"]


@dataclass(frozen=True)
class ScheduledNode:
    """A pass of a schedule."""

    type: str
    chunk: int
    stage: int
    minibatch: int
    start_time: int = 0
    completion_time: int = 0
    rollback: bool = False


@dataclass(frozen=True)
class PipelineGraph:
    """Stages, microbatches and costs. `HybridParallelPlugin(pp_style="zbv")` makes its schedule without them."""

    n_stage: int
    n_micro: int
    f_cost: float
    b_cost: float
    w_cost: float
    c_cost: float
    f_mem: float
    b_mem: float
    w_mem: float
    max_mem: float | None = None

    def get_v_schedule(self, only_run_time: bool = False) -> list[Any]:
        """Return no passes: the plugin makes them, for the microbatches that come."""
        return []
