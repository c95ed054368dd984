"""A model that does not learn, on a mesh: the transforms of one that trains, its weights alone, and forwards."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.apply import transform
from cai_apps.compose.forwards import scores
from cai_apps.compose.materialize import InitialValues, materialize
from cai_apps.compose.quantized_base import quantized_layers
from cai_apps.compose.sharding import (
    DTYPES,
    load_pretrained,
    shard_initial,
    sharding_options,
    share_tied,
)
from cai_apps.compose.workload import Batch, Loss, Score, Workload, on_meta
from cai_apps.config.memory import offloads
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec, microbatches
from cai_gemini import HostModel
from cai_mesh.comm import build_mesh
from cai_pipeline import PipelineRunner
from cai_zero import ModuleSharding, sharding_of


@dataclass
class FrozenModel:
    """A model that does not learn, with its weights in the compute dtype: a `Forwards`.

    Where a run offloads and does not shard, they stay on the host and come layer by layer (`cai_gemini.HostModel`); in
    stage 3 each rank has its part of them.
    """

    mesh: DeviceMesh
    model: nn.Module
    runner: PipelineRunner
    workload: Workload
    loss: Loss
    present: AbstractContextManager[Any]
    """A context in which weights are where forwards find them."""

    def scores(self, microbatches: Sequence[Batch], score: Score) -> list[Tensor]:
        """Return what a function says of each microbatch; nothing but on the last stage. Collective."""
        with self.present:
            return scores(self.runner, self.workload, self.loss, microbatches, score)


def freeze(config: RunConfig, workload: Workload, *, device: torch.device) -> FrozenModel:
    """Build the model of a resolved config so that it only runs forward, with the values that training begins with.

    Collective: every rank of the job calls it. Raises `CaiError`s of the transforms before any memory is allocated.
    """
    mesh = build_mesh(mesh_spec(config), device_type=device.type)
    model = on_meta(workload)
    frozen = frozenset(
        quantized_layers(model)
    )  # of the model that learns: adapters are not quantized here either
    model.requires_grad_(False)
    loss = transform(config, workload, model, mesh, device=device)
    on_host = offloads(config, mesh.size()) and config.parallel.zero != 3
    sharding = _place(config, workload, model, mesh, torch.device("cpu") if on_host else device, frozen)
    present: AbstractContextManager[Any] = nullcontext()
    if on_host:
        present = HostModel(model, device, workload.layers(model))
    runner = PipelineRunner(
        model,
        mesh,
        schedule=config.parallel.pipeline.schedule,
        microbatches=microbatches(config),
        loss_fn=loss,
        sharding=sharding,
        wire=config.parallel.pipeline.wire,
    )
    return FrozenModel(mesh, model, runner, workload, loss, present)


def _place(
    config: RunConfig,
    workload: Workload,
    model: nn.Module,
    mesh: DeviceMesh,
    device: torch.device,
    frozen: Collection[str],
) -> ModuleSharding | None:
    """Give a model its values in the compute dtype, in stage 3 to each rank its part; returns the sharding then.

    Random values are those of master weights, rounded. Layers of the names `frozen` are quantized where the workload
    says so.
    """
    compute, is_random = DTYPES[config.precision.compute], workload.pretrained is None
    options = {
        "seed": config.train.seed,
        "dtype": torch.promote_types(compute, torch.float32) if is_random else compute,
        "device": device,
        "pretrained": not is_random,
    }
    if config.parallel.zero == 3:
        for param in model.parameters():
            param.data = param.data.to(compute)
        values = InitialValues(model, workload.initializer, **options)
        shard_initial(model, mesh, values, device=device, **sharding_options(config, mesh))
        load_pretrained(workload, model)
        return sharding_of(model)
    finished = None if workload.quantized is None else workload.quantized.filler(model, frozen)
    materialize(model, workload.initializer, **options, finished=finished)
    for param in model.parameters():
        if param.is_floating_point():  # codes are not
            param.data = param.data.to(compute)
        share_tied(param, param)
    load_pretrained(workload, model)
    return None
