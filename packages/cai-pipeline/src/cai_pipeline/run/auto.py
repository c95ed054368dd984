"""`schedule = "auto"`: a step is measured, then a schedule is searched for what it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cai_mesh.comm import ParallelMesh, all_gather_object, axis_names
from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import Program
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.scheduler import POLICIES, Costs, Found, most_bytes, search
from cai_pipeline.plans.schedules import SCHEDULES, program
from cai_pipeline.plans.simulation import simulate
from cai_pipeline.run.recorder import Recorder, costs_of, gather

MEASURED_STEP = 2
"""The first step compiles, and reserves memory."""
SPARE = 0.08
"""The part of a device's memory that the allocator may lose between tensors, or that is passed on and not counted."""
SHARES = (0.0, 0.1, 0.25, 0.5, 1.0)
"""The parts of the memory that the fullest device has left, for which schedules are searched."""
SEARCHED = 300_000
"""Actions that may be placed in all tries of a search, about 20 s: other ranks wait, and take longer for a fault."""
WORTH = 1.01
"""A schedule that takes more memory is chosen if the others take this much longer."""


@dataclass(frozen=True)
class Choice:
    """The chosen schedule, and the reasons.

    Args:
        name: the schedule's name, "searched" for one without.
        program: the compute actions of each rank.
        time: seconds of a step's passes, predicted.
        others: the same of each named schedule that takes this placement, whether its memory fits or not.
        costs: the measured costs, in seconds and bytes.
        bytes: bytes of activations that each rank will hold at most.
    """

    name: str
    program: Program
    time: float
    others: dict[str, float]
    costs: Costs
    bytes: tuple[float, ...]

    def __str__(self) -> str:
        named = ", ".join(f"{name} {1000 * time:.0f}" for name, time in self.others.items())
        costs = self.costs
        passes = zip(costs.forward, costs.backward_input, costs.backward_weight, strict=True)
        stages = ", ".join("/".join(f"{1000 * time:.1f}" for time in of_stage) for of_stage in passes)
        return (
            f"pipeline schedule {self.name}: {1000 * self.time:.0f} ms a step predicted ({named}); "
            f"forward, gradient of inputs and of weights of each stage in ms: {stages}; "
            f"a transfer {1000 * costs.transfer:.2f}; "
            f"{max(self.bytes) / 2**30:.1f} GiB of activations on a rank"
        )


def choose(
    recorder: Recorder, measured: Program, stage_ranks: Held, microbatches: int, mesh: ParallelMesh
) -> Choice:
    """The fastest schedule for what a step took, of those that fit the devices.

    Collective, and the same on all ranks of the mesh, since data ranks reduce gradients in the order of the schedule:
    the costs are those of the mesh's first pipeline, the memory that of the fullest device at each place in one.

    Args:
        recorder: the recorder of the step.
        measured: the compute actions it performed.
        stage_ranks: rank of each stage.
        microbatches: microbatches per step.
        mesh: the mesh of all ranks that train together.
    """
    pipeline = mesh.group("pp")
    costs = costs_of(gather(recorder.recorded(), pipeline), stage_ranks)
    room = all_gather_object(_room(recorder.device), pipeline)
    for axis in axis_names(mesh):
        if axis not in mesh.leaves("pp"):
            reports = all_gather_object((costs, room), mesh.group(axis))
            costs, room = (
                reports[0][0],
                [min(of_place) for of_place in zip(*(rank_room for _, rank_room in reports), strict=True)],
            )
    cheapest = _cheapest(stage_ranks, microbatches, costs, most_bytes(measured, costs), room)
    named_times = {}
    for name in SCHEDULES:
        try:
            named = program(name, stage_ranks, microbatches)
        except PlanError:  # it does not take this placement
            continue
        named_times[name] = simulate(named, costs.duration, transfer=costs.transfer).makespan
    return Choice(cheapest.name, cheapest.program, cheapest.time, named_times, costs, cheapest.bytes)


def _cheapest(
    stage_ranks: Held, microbatches: int, costs: Costs, used: Sequence[float], room: Sequence[float]
) -> Found:
    """The schedule found for the least memory of the fullest device, among those that are about the fastest.

    Args:
        used: bytes of activations that each rank held in the measured step.
        room: bytes that each had left.
    """
    schedules, fullest = [], min(room)
    tries = max(1, SEARCHED // (3 * microbatches * len(stage_ranks)))
    shares = SHARES if fullest < float("inf") and tries >= len(SHARES) else SHARES[-1:]
    policies = POLICIES[:: math.ceil(len(POLICIES) * len(shares) / tries)]
    for share in shares:
        still_free = (1 - share) * fullest if share < 1 else 0.0
        limits = [most + free - still_free for most, free in zip(used, room, strict=True)]
        schedules.append(search(stage_ranks, microbatches, costs, limits, policies=policies))
    best = min(schedule.time for schedule in schedules)
    return next(schedule for schedule in schedules if schedule.time <= WORTH * best)


def _room(device: torch.device) -> float:
    """Bytes of a device that no step so far has needed. Hosts are taken to have enough."""
    if device.type != "cuda":
        return float("inf")
    free, total = torch.cuda.mem_get_info(device)
    reserved = torch.cuda.memory_reserved(device)
    return max(0.0, free + reserved - torch.cuda.max_memory_allocated(device) - SPARE * total)
