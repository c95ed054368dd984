"""The plan of a config: its mesh, and what each pipeline stage's ranks will hold."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise

import torch
from torch import nn

from cai_apps.compose.apply import rewrite
from cai_apps.compose.quantized_base import bytes_saved
from cai_apps.compose.workload import Workload, on_meta
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec
from cai_apps.planner.activations import Saved, saved_bytes
from cai_apps.planner.memory import (
    COMPUTE_BYTES,
    MASTER_BYTES,
    ModelState,
    accumulates,
    beside_bytes,
    clips_samples,
    model_state,
    moment_bytes,
    most_kept,
)
from cai_apps.planner.offloaded import OffloadNeeds, offload_needs
from cai_apps.planner.world import imaginary_rank
from cai_mesh.comm import AXES
from cai_mesh.layout import layout_of
from cai_mesh.storage import units
from cai_pipeline import Action, Stages, begin_with, place, placement_of

AWAY = 3
"""Inputs of blocks on the device where they wait on the host: those of the last block, and two on their way."""


@dataclass(frozen=True)
class StagePlan:
    """One pipeline rank, with all its stages; others at its place hold as much. Bytes, where not said otherwise."""

    rank: int
    """Its place in the pipeline."""
    blocks: tuple[str, ...]
    """Names of its blocks of layers."""
    parameters: int
    """Elements of its tensor shard, before ZeRO."""
    state: ModelState
    unsharded: int
    """Parameters that ZeRO-3 holds gathered at once, and gradients on their way to their shards."""
    activations: int
    """Kept for backward when most microbatches are in flight, and what backward or the loss takes beside."""
    accumulates: bool
    """Whether all gradients are there while activations are: from an earlier microbatch of the step."""

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment. In a step of one microbatch gradients come as activations go.

        When the optimizer steps there are no activations, and perhaps master weights in one piece.
        """
        transient = self.state.gradients + self.activations
        if not self.accumulates:
            transient = max(self.state.gradients, self.activations)
        passes = self.state.parameters + self.state.optimizer + self.unsharded + transient
        return max(passes, self.state.total + self.state.joined)


@dataclass(frozen=True)
class Plan:
    config: RunConfig
    """The config with everything worked out."""
    device: str
    """What the run is planned for: cuda or cpu."""
    ranks: int
    parameters: int
    """Elements of the whole model."""
    frozen: int
    """Elements among them that do not learn."""
    axes: dict[str, int]
    stages: tuple[StagePlan, ...]
    offload: OffloadNeeds | None
    """What the run takes on one rank with `memory.residency` other than device; None on several ranks."""

    @property
    def peak(self) -> int:
        """Bytes of the rank that holds most, where training state stays on the device."""
        return max(stage.peak for stage in self.stages)


def device_of(config: RunConfig) -> torch.device:
    """The kind of device a run is planned for: a GPU, unless the config says otherwise."""
    return torch.device("cpu" if config.train.device == "cpu" else "cuda")


@dataclass
class Models:
    """Models on the meta device for plans of one workload, whose configs differ in nothing that a transform reads.

    A model of hundreds of layers takes seconds to be built and transformed.
    """

    _model: nn.Module | None = None
    _stages: dict[int, nn.Module] = field(default_factory=dict)

    def whole(self, workload: Workload) -> nn.Module:
        """Return the model as it is."""
        if self._model is None:
            self._model = on_meta(workload)
        return self._model

    def stage(self, config: RunConfig, workload: Workload, rank: int) -> nn.Module:
        """Return what a pipeline rank makes of it."""
        if rank not in self._stages:
            spec, model = mesh_spec(config), on_meta(workload)
            with imaginary_rank(spec, rank * (spec.world_size // spec.pp)) as mesh:
                rewrite(config, workload, model, mesh, device=device_of(config))
            self._stages[rank] = model
        return self._stages[rank]


def plan_run(
    config: RunConfig,
    workload: Workload,
    *,
    ranks: int,
    saved: Saved | None = None,
    models: Models | None = None,
) -> Plan:
    """Work out a run of a resolved config, with the model as `compose` rewrites it.

    Args:
        workload: the workload that is trained.
        ranks: the number of ranks of the run.
        saved: bytes that a forward keeps, where they are known already: nothing but recompute, ZeRO, data ranks,
            pipeline stages and the optimizer differ.
        models: those of another plan, of a config that differs in no more than recompute and `unshard`.

    Raises:
        CaiError: an error of a transform.
    """
    device = device_of(config)
    saved = saved or saved_bytes(config, workload, device)
    models = models or Models()
    stages = tuple(
        _stage(config, workload, rank, saved, models) for rank in range(config.parallel.pipeline.size)
    )
    full_model, spec = models.whole(workload), mesh_spec(config)
    trained, frozen = elements(full_model)
    may_offload = ranks == 1 and workload.quantized is None
    needs = offload_needs(config, full_model, stages[0].activations) if may_offload else None
    axes = {axis: spec.sizes()[axis] for axis in AXES}
    return Plan(config, device.type, ranks, trained + frozen, frozen, axes, stages, needs)


def elements(model: nn.Module) -> tuple[int, int]:
    """Return the number of elements of a model that learn, and the number of those that do not."""
    sizes = {True: 0, False: 0}
    for parameter in model.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    return sizes[True], sizes[False]


def _sharded(config: RunConfig, model: nn.Module) -> tuple[int, int]:
    """Return the elements of a stage's tensor shard that learn, and that do not, on a rank that ZeRO shards them over.

    The ranks of `shard` divide parameters between them; of experts only those that hold the same ones.
    """
    spec = mesh_spec(config)
    sizes = {(learns, spread): 0 for learns in (True, False) for spread in (True, False)}
    for parameter in model.parameters():
        sizes[parameter.requires_grad, "ep" in layout_of(parameter).sharded_axes] += parameter.numel()
    dense, experts = config.parallel.zero_ranks, spec.edp
    return (
        -(-sizes[True, False] // dense) - (-sizes[True, True] // experts),
        -(-sizes[False, False] // dense) - (-sizes[False, True] // experts),
    )


def _stage(config: RunConfig, workload: Workload, rank: int, saved: Saved, models: Models) -> StagePlan:
    pipeline, model = config.parallel.pipeline, models.stage(config, workload, rank)
    names = {module: name for name, module in model.named_modules()}
    block_names = tuple(names[layer] for layer in workload.layers(model))
    trained, frozen = elements(model)
    moments, shares = moment_bytes(config, model), _sharded(config, model)
    state = model_state(config, trained, moments, frozen=frozen, sharded=shares)
    if workload.frozen_elements:
        share = workload.frozen_elements * (trained + frozen) // sum(elements(models.whole(workload)))
        state = replace(state, parameters=state.parameters + beside_bytes(config, share))
    if workload.quantized is not None:
        saved_by_codes = bytes_saved(model, workload.quantized.kind, COMPUTE_BYTES[config.precision.compute])
        state = replace(state, parameters=state.parameters - saved_by_codes)
    placement = place(pipeline.size, pipeline.chunks, placement_of(pipeline.schedule, pipeline.chunks))
    order = begin_with(pipeline.schedule, placement, pipeline.microbatches or 1)[rank]
    return StagePlan(
        rank,
        block_names,
        trained + frozen,
        state,
        unsharded_bytes(config, model),
        _activations(config, saved, _blocks(model, block_names), order, last=Stages.of(model).has_last),
        accumulates(config),
    )


def _blocks(model: nn.Module, names: tuple[str, ...]) -> dict[int, list[str]]:
    """Return the names of a rank's blocks by stage."""
    stages = Stages.of(model).own
    if len(stages) == 1:
        return {next(iter(stages)): list(names)}
    return {
        index: [name for name in names if int(name.rpartition(".")[2]) in stage.layers]
        for index, stage in stages.items()
    }


def unsharded_bytes(config: RunConfig, model: nn.Module) -> int:
    """Return the bytes of parameters and gradients that are whole for a while, on ranks that share them.

    Stage 3 gathers a unit and the one ahead of it, or all for a step of a pipeline. Stages 2 and 3, and 1 where nothing
    accumulates, fill the gradients of a unit while those of the one before are reduced. Where samples are clipped,
    those of a sample are all there.
    """
    parallel = config.parallel
    compute, master = COMPUTE_BYTES[config.precision.compute], MASTER_BYTES[config.precision.compute]
    clips = clips_samples(config)
    sample = elements(model)[0] * master if clips else 0  # beside those of the samples before it
    if parallel.pipeline.unshard == "step":
        learned, frozen = elements(model)
        copies = (learned + frozen) * compute * (parallel.zero_ranks > 1 or compute < master)
        return copies + learned * master * (parallel.zero_ranks > 1)
    if parallel.zero_ranks == 1:
        return sample
    unit_params = [[parameter for _, parameter in unit] for unit in units(model).values()]
    gathered = _most_of_two([sum(param.numel() for param in unit) for unit in unit_params])
    learned = _most_of_two(
        [sum(param.numel() for param in unit if param.requires_grad) for unit in unit_params]
    )
    reduces = not clips and (parallel.zero in (2, 3) or (parallel.zero == 1 and not accumulates(config)))
    return gathered * (parallel.zero == 3) * compute + learned * reduces * master + sample


def _most_of_two(sizes: list[int]) -> int:
    """Return the most that a unit and the one after it have together."""
    return max((a + b for a, b in pairwise(sizes)), default=sum(sizes))


def _activations(
    config: RunConfig, saved: Saved, blocks: dict[int, list[str]], order: list[Action], *, last: bool
) -> int:
    """Return the bytes kept when most is kept, and what comes and goes then.

    With recompute a block keeps its input (and results that selective and most keep), and one block at a time has all
    it would keep without. Inputs that wait on the host are on the device for the last block, and on their way from and
    to it.

    Args:
        blocks: names of the rank's blocks, by stage.
        order: the rank's actions.
        last: whether it has the end of the model.
    """
    recompute, away = config.memory.recompute, config.memory.activations == "host"
    block_names = [name for names in blocks.values() for name in names]

    def kept(*tables: dict[str, int]) -> int:
        """Return the bytes of these tables when most is kept, with those of what comes after the last block."""
        stage_bytes = {
            index: sum(table.get(name, 0) for table in tables for name in names)
            for index, names in blocks.items()
        }
        if last:
            stage_bytes[max(stage_bytes)] += saved.rest
        return most_kept(order, stage_bytes)

    loss = saved.loss if last else 0
    if recompute == "none":
        return kept(saved.kept) + loss
    results = {"selective": [saved.products], "most": [saved.attention], "full": []}[recompute]
    again = max((saved.kept.get(name, 0) for name in block_names), default=0)
    if not away:
        return kept(saved.inputs, *results) + max(loss, again)
    largest = max((saved.inputs.get(name, 0) for name in block_names), default=0)
    return min(len(block_names), AWAY) * largest + kept(*results) + max(loss, again)
