"""The plan of a config: its mesh, and what each pipeline stage's ranks will hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cai_apps.compose.workload import Batch, Workload, on_meta
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec
from cai_apps.planner.activations import REST, Saved, saved_bytes
from cai_apps.planner.memory import (
    COMPUTE_BYTES,
    ModelState,
    gathered,
    model_state,
    moment_bytes,
    most_in_flight,
)
from cai_apps.planner.offloaded import OffloadNeeds, offload_needs
from cai_apps.planner.world import imaginary_rank
from cai_mesh.comm import AXES
from cai_mesh.storage import blocks
from cai_pipeline import program, split
from cai_tensor_parallel import parallelize

AWAY = 3
"""Inputs of blocks on the device where they wait on the host: those of the last block, and two on their way."""


@dataclass(frozen=True)
class StagePlan:
    """One rank of a pipeline stage; the stage's other ranks hold as much."""

    stage: int
    blocks: tuple[str, ...]
    """Names of the blocks of layers on this stage."""
    parameters: int
    """Elements of the stage's tensor shard, before ZeRO."""
    state: ModelState
    gathered: int
    """Bytes of parameters that ZeRO-3 holds unsharded at once."""
    activations: int
    """Bytes kept for backward when most microbatches are in flight. An estimate."""


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    """With everything worked out."""
    ranks: int
    parameters: int
    """Elements of the whole model."""
    axes: dict[str, int]
    stages: tuple[StagePlan, ...]
    offload: OffloadNeeds | None
    """What the run takes on one rank with `memory.residency` other than device; None on several ranks."""


def plan_run(
    config: RunConfig, workload: Workload, batch: Callable[[], Batch], *, ranks: int, width: int
) -> Plan:
    """Works out a run of a resolved config.

    Args:
        workload: what is trained.
        batch: a microbatch, made on the device of the context.
        ranks: of the run.
        width: elements of a sample's hidden states between two layers.

    Raises:
        CaiError: what the transforms raise.
    """
    with imaginary_rank(mesh_spec(config), 0) as mesh:
        saved = saved_bytes(config, workload, batch, mesh)
    stages = tuple(
        _stage(config, workload, stage, saved, width) for stage in range(config.parallel.pipeline.size)
    )
    unsharded = sum(parameter.numel() for parameter in on_meta(workload).parameters())
    spec = mesh_spec(config)
    needs = offload_needs(config, on_meta(workload), stages[0].activations) if ranks == 1 else None
    return Plan(config, ranks, unsharded, {axis: spec.sizes()[axis] for axis in AXES}, stages, needs)


def _stage(config: RunConfig, workload: Workload, stage: int, saved: Saved, width: int) -> StagePlan:
    spec, pipeline = mesh_spec(config), config.parallel.pipeline
    model = on_meta(workload)
    with imaginary_rank(spec, stage * (spec.world_size // spec.pp)) as mesh:
        split(model, mesh, trial=workload.trial)
        parallelize(model, mesh)
    names = {module: name for name, module in model.named_modules()}
    sizes = {block: sum(parameter.numel() for _, parameter in held) for block, held in blocks(model).items()}
    rest = sizes.pop(model, 0)
    own = tuple(names[block] for block in sizes)
    parameters = rest + sum(sizes.values())
    order = program(pipeline.schedule, pipeline.size, pipeline.microbatches or 1)[stage]
    last = stage == pipeline.size - 1
    activations = _activations(config, width, saved, own, most_in_flight(order), last=last)
    state = model_state(config, parameters, moment_bytes(config, model))
    unsharded = gathered(config, list(sizes.values()), rest)
    return StagePlan(stage, own, parameters, state, unsharded, activations)


def _activations(
    config: RunConfig, width: int, saved: Saved, own: tuple[str, ...], in_flight: int, *, last: bool
) -> int:
    """Bytes kept when most microbatches are in flight.

    With recompute a block keeps its input (and what selective keeps), and one block at a time has all it would keep
    without. Inputs that wait on the host are on the device for the last block, and on their way from and to it.
    """
    inside = [saved.bytes.get(name, 0) for name in own]
    rest = saved.bytes.get(REST, 0) if last else 0
    if config.memory.recompute == "none":
        return in_flight * (sum(inside) + rest)
    block_input = config.train.microbatch_size * width * COMPUTE_BYTES[config.precision.compute]
    products = (
        sum(saved.products.get(name, 0) for name in own) if config.memory.recompute == "selective" else 0
    )
    inputs = min(len(inside), AWAY) if config.memory.activations == "host" else in_flight * len(inside)
    return inputs * block_input + in_flight * (rest + products) + max(inside)
