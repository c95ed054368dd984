"""Gives a transformed model its memory: where values, gradients and optimizer state live, and who shards them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_apps.compose.materialize import InitialValues, local_part, materialize
from cai_apps.compose.optimizers import make_optimizer
from cai_apps.compose.weights import Offloaded, Replicated, Sharded, Weights
from cai_apps.compose.workload import Workload
from cai_apps.config.memory import offloads
from cai_apps.config.precision import splits_master
from cai_apps.config.sections import Memory, Parallel, RunConfig
from cai_gemini import ChunkResidency, offload
from cai_mesh.comm import all_reduce
from cai_mesh.layout import reduce_of
from cai_zero import (
    Compression,
    Gather,
    MixedPrecision,
    shard_module,
    shard_optimizer,
    sharding_of,
)

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp64": torch.float64,
}


def place_weights(
    config: RunConfig, workload: Workload, model: nn.Module, mesh: DeviceMesh, *, device: torch.device
) -> Weights:
    """Fill a model on the meta device and shard or offload it, with its optimizer.

    Raises what `cai_zero` and `cai_gemini` raise for memory that is too small.
    """
    compute = DTYPES[config.precision.compute]
    precision = MixedPrecision(
        compute=compute,
        master=torch.float32 if compute.itemsize == 2 else compute,
        split_master=splits_master(config),
    )
    if offloads(config, mesh.size()):
        weights = _offload(config, workload, model, mesh, precision, device)
        load_pretrained(workload, model)
        return weights
    if config.parallel.zero == 3:
        return _shard_module(config, workload, model, mesh, precision, device)
    materialize(
        model,
        workload.initializer,
        seed=config.train.seed,
        dtype=precision.master or compute,
        frozen=compute,
        device=device,
        pretrained=workload.pretrained is not None,
        finished=None if workload.quantized is None else workload.quantized.filler(model),
    )
    for param in model.parameters():
        share_tied(param, param)
    load_pretrained(workload, model)
    return _shard_optimizer(config, model, mesh, precision)


@torch.no_grad()
def share_tied(param: nn.Parameter, values: Tensor) -> Tensor:
    """Return the owner's values of a parameter that several stages hold, in place. Collective over these stages.

    A stage gives them the values of its own kind of layer; an embedding's differ from those of the head it is tied to
    (the row of padding).
    """
    spec = reduce_of(param)
    if spec.tied is not None:
        if not spec.owner:
            values.zero_()
        all_reduce(values, spec.tied)
    return values


def load_pretrained(workload: Workload, model: nn.Module) -> None:
    """Fill a model from the files of its workload, if it has any. Collective."""
    if workload.pretrained is not None:
        workload.pretrained(model)


def _offload(
    config: RunConfig,
    workload: Workload,
    model: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecision,
    device: torch.device,
) -> Weights:
    """Put initial values into host memory chunk by chunk; at most one block is on the device meanwhile."""
    values, memory = _initial_values(config, workload, model, precision, device), config.memory
    _, offloaded = offload(
        model,
        make_optimizer(config, model, mesh, offloaded=True),
        residency=memory.residency,
        device=device,
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        nvme=_directory(memory),
        compute=precision.compute,
        materialize=values,
    )
    values.finish()
    return Offloaded(model, offloaded, sync=None)  # backward after backward, gradients add up where they are


def _initial_values(
    config: RunConfig, workload: Workload, model: nn.Module, precision: MixedPrecision, device: torch.device
) -> InitialValues:
    """Return the initial values of a model on the meta device, whose parameters get the dtypes that they will have."""
    master = precision.master or precision.compute
    for param in model.parameters():
        param.data = param.data.to(master if param.requires_grad else precision.compute)
    return InitialValues(
        model,
        workload.initializer,
        seed=config.train.seed,
        dtype=master,
        device=device,
        frozen=precision.compute,
        pretrained=workload.pretrained is not None,
    )


def shard_initial(model: nn.Module, mesh: DeviceMesh, values: InitialValues, **options: Any) -> None:
    """Shard a model on the meta device, block by block as it gets its values. Collective.

    Args:
        model: the model; no rank ever holds more than a block of it in full.
        mesh: the mesh of the ranks.
        values: the values of its parameters.
        options: those of `cai_zero.shard_module`.
    """

    def make(name: str, param: nn.Parameter) -> Tensor:
        return share_tied(param, local_part(values(name, param), param))

    shard_module(model, mesh, materialize=make, **options)
    values.finish()


def _shard_module(
    config: RunConfig,
    workload: Workload,
    model: nn.Module,
    mesh: DeviceMesh,
    precision: MixedPrecision,
    device: torch.device,
) -> Weights:
    residency = _residency(config.memory)
    values = _initial_values(config, workload, model, precision, device)
    options = {"precision": precision, "residency": residency, "device": device}
    shard_initial(model, mesh, values, **options, **sharding_options(config, mesh))
    load_pretrained(workload, model)
    optimizer = make_optimizer(config, model, mesh, offloaded=residency is not None)
    sharding = sharding_of(model)
    if residency is not None:
        return Offloaded(model, residency.optimizer(optimizer), sync=sharding)
    return Sharded(model, optimizer, sharding, mesh)


def sharding_options(config: RunConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Return how the shards of stage 3 travel."""
    return {
        "gather": Gather(copy_engines=_copy_engines(config, mesh)),
        "compression": _compression(config.parallel),
        "driver": "actions" if config.parallel.pipeline.unshard == "step" else "hooks",
    }


def stepped_options(config: RunConfig, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the stage of 0 to 2, and how what its optimizer steps travels."""
    return {
        "stage": config.parallel.zero,
        "overlap_gather": True,
        "compression": _compression(config.parallel),
        "copy_engines": _copy_engines(config, mesh),
    }


def _shard_optimizer(
    config: RunConfig, model: nn.Module, mesh: DeviceMesh, precision: MixedPrecision
) -> Weights:
    optimizer = make_optimizer(config, model, mesh)
    options = stepped_options(config, mesh)
    optimizer = shard_optimizer(optimizer, mesh, model=model, precision=precision, **options)
    return Replicated(model, optimizer, stay=not splits_master(config))


def _compression(parallel: Parallel) -> Compression | None:
    """Return what travels in a byte an element; None: nothing does."""
    forms = {
        "weights": None if parallel.wire_weights == "full" else parallel.wire_weights,
        "gradients": None if parallel.wire_gradients == "full" else parallel.wire_gradients,
    }
    return Compression(**forms) if any(forms.values()) else None


def _residency(memory: Memory) -> ChunkResidency | None:
    """Return where the shards of ZeRO-3 live on several ranks; None: on the device."""
    if memory.residency == "device":
        return None
    return ChunkResidency(
        memory.residency,
        device_memory=memory.device_memory,
        host_memory=memory.host_memory,
        nvme=_directory(memory),
    )


def _directory(memory: Memory) -> Path | None:
    return None if memory.nvme is None else Path(memory.nvme).expanduser()


def _copy_engines(config: RunConfig, mesh: DeviceMesh) -> bool:
    """Whether shards are gathered by copies between GPUs: by the config, or where all ranks run on one host.

    Copies are of shards as they are: weights that travel in fewer bytes go through collectives.
    """
    if config.parallel.copy_engines != "auto" or config.parallel.wire_weights != "full":
        return config.parallel.copy_engines == "on"
    return mesh.device_type == "cuda" and config.parallel.zero_ranks > 1 and on_one_host()


def on_one_host() -> bool:
    """Whether the job has several ranks, and all of them run on this host."""
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", torch.cuda.device_count()))
    return 1 < dist.get_world_size() <= local_ranks
