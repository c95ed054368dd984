"""The plan of a config: its mesh, and what each pipeline stage's ranks will hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cai_apps.config import Config
from cai_apps.models import load_model_config, meta_model
from cai_apps.planner.activations import REST, saved_bytes
from cai_apps.planner.memory import COMPUTE_BYTES, ModelState, gathered, model_state, most_in_flight
from cai_apps.planner.offloaded import OffloadNeeds, offload_needs
from cai_apps.planner.world import imaginary_rank
from cai_apps.validate import mesh_spec, resolve
from cai_mesh.comm import AXES
from cai_mesh.storage import blocks
from cai_pipeline import program, split
from cai_tensor_parallel import parallelize

if TYPE_CHECKING:
    from transformers import PretrainedConfig

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
    config: Config
    """With everything worked out."""
    ranks: int
    parameters: int
    """Elements of the whole model."""
    axes: dict[str, int]
    stages: tuple[StagePlan, ...]
    offload: OffloadNeeds | None
    """What the run takes on one rank with `memory.residency` other than device; None on several ranks."""


def plan(config: Config, *, ranks: int | None = None) -> Plan:
    """Works out a run on `ranks` ranks; None: as many as the degrees make, with an open `shard` taken as 1.

    Raises:
        CaiError: what `train` would raise before its ranks start.
    """
    import torch

    spec = mesh_spec(config)
    if ranks is None:
        ranks = spec.pp * spec.dp_replicate * max(1, spec.dp_shard) * spec.tp
    model_config = load_model_config(config.model.name)
    config = resolve(config, model_config, ranks)
    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}[config.precision.compute]
    shape = {"microbatch_size": config.train.microbatch_size, "sequence_length": config.data.sequence_length}
    with imaginary_rank(mesh_spec(config), 0) as mesh:
        saved = saved_bytes(model_config, mesh, dtype, linear=config.precision.linear, **shape)
    stages = tuple(
        _stage(config, model_config, stage, saved) for stage in range(config.parallel.pipeline.size)
    )
    whole = sum(parameter.numel() for parameter in meta_model(model_config).parameters())
    spec = mesh_spec(config)
    needs = offload_needs(config, model_config, stages[0].activations) if ranks == 1 else None
    return Plan(config, ranks, whole, {axis: spec.sizes()[axis] for axis in AXES}, stages, needs)


def _stage(config: Config, model_config: PretrainedConfig, stage: int, saved: dict[str, int]) -> StagePlan:
    spec, pipeline = mesh_spec(config), config.parallel.pipeline
    model = meta_model(model_config)
    with imaginary_rank(spec, stage * (spec.world_size // spec.pp)) as mesh:
        split(model, mesh)
        parallelize(model, mesh)
    names = {module: name for name, module in model.named_modules()}
    sizes = {block: sum(parameter.numel() for _, parameter in held) for block, held in blocks(model).items()}
    rest = sizes.pop(model, 0)
    own = tuple(names[block] for block in sizes)
    parameters = rest + sum(sizes.values())
    order = program(pipeline.schedule, pipeline.size, pipeline.microbatches or 1)[stage]
    kept = {name: saved.get(name, 0) for name in own}
    if stage == pipeline.size - 1:
        kept[REST] = saved.get(REST, 0)
    activations = _activations(config, model_config.hidden_size, kept, most_in_flight(order))
    state, unsharded = model_state(config, parameters), gathered(config, list(sizes.values()), rest)
    return StagePlan(stage, own, parameters, state, unsharded, activations)


def _activations(config: Config, width: int, kept: dict[str, int], in_flight: int) -> int:
    """With full recompute a block keeps its input, and one block at a time has all it would keep without.

    Inputs that wait on the host are on the device for the last block, and on their way from and to it.
    """
    if config.memory.recompute == "none":
        return in_flight * sum(kept.values())
    tokens = config.train.microbatch_size * config.data.sequence_length
    block_input = tokens * width * COMPUTE_BYTES[config.precision.compute]
    rest = kept.get(REST, 0)
    inside = [held for name, held in kept.items() if name != REST]
    inputs = min(len(inside), AWAY) if config.memory.activations == "host" else in_flight * len(inside)
    return inputs * block_input + in_flight * rest + max(inside)
