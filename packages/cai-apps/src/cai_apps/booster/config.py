"""The config of a boosted model: cai's sections, and what only a loop of the user's own needs beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal

from cai_apps.config.optimizer import Optimizer
from cai_apps.config.ranges import COUNT, POSITIVE, SHARE, Range
from cai_apps.config.sections import RunConfig
from cai_apps.config.validation import mesh_spec, resolve


@dataclass(frozen=True)
class Scaling:
    """How the loss is scaled with `precision.compute = "fp16"`."""

    initial: Annotated[float, POSITIVE] = 2.0**16
    """First scale."""
    growth: Annotated[float, Range(above=1)] = 2.0
    """What the scale is multiplied by after `interval` steps without overflow."""
    backoff: Annotated[float, Range(above=0, below=1)] = 0.5
    """What it is multiplied by after a step that overflowed, which is left out."""
    interval: Annotated[int, COUNT] = 1000


@dataclass(frozen=True)
class OnDevice:
    """The shares that stay on the device with `memory.residency = "host"`."""

    weights: Annotated[float, SHARE] = 0.0
    """Share of the weights in the dtype of computation."""
    state: Annotated[float, SHARE] = 0.0
    """Share of master weights, gradients and optimizer state."""


@dataclass(frozen=True)
class BoostConfig(RunConfig):
    """A config of cai with three sections more. Of `optimizer` only `clip` counts: the optimizer is the user's."""

    optimizer: Optimizer = field(default_factory=lambda: Optimizer(clip=math.inf))
    scaling: Scaling = field(default_factory=Scaling)
    on_device: OnDevice = field(default_factory=OnDevice)
    masters: bool = True
    """Whether master weights are fp32 where `precision.compute` has fewer bits; no: there are none apart."""
    reduce: Literal["auto", "fp32", "bf16", "fp16"] = "auto"
    """Dtype in which gradients are summed over ranks; auto: that of the master weights."""
    casts_inputs: bool = True
    """Whether floating-point tensors that the model is called with become those of computation."""
    outputs: Literal["compute", "fp32"] = "compute"
    """Dtype of what the model returns."""
    recompute_share: Annotated[float, SHARE] = 1.0
    """Part of the layers that run again in backward, where the model's gradient checkpointing is on."""
    recompute_layers: tuple[int, ...] = ()
    """How many layers of each stage run again; empty: by the share."""


def resolved(config: BoostConfig, ranks: int, device: str) -> BoostConfig:
    """Return the config with its degrees worked out for a number of ranks and a device.

    What would be sent in fewer bits is sent as it is where there is nobody to send it to. On a CPU "auto" leaves
    everything on the device, which host memory is.

    Args:
        config: the config of a plugin.
        ranks: the number of ranks of the job.
        device: "cpu" or "cuda".

    Raises:
        CaiError: the degrees do not multiply to the ranks, or options do not go together.
    """
    parallel, memory = config.parallel, config.memory
    spec = mesh_spec(config).resolve(ranks)
    alone = spec.dp_shard * spec.cp < 2 or parallel.zero == 0
    wires = {"wire_weights": "full", "wire_gradients": "full"} if alone else {}
    if memory.residency == "auto" and device == "cpu" and memory.device_memory is None:
        memory = replace(memory, residency="device")
    pipeline = parallel.pipeline
    if pipeline.size == 1:
        pipeline = replace(pipeline, chunks=1, schedule="1f1b", wire="full", balance=())
    parallel = replace(parallel, shard=spec.dp_shard, pipeline=pipeline, **wires)
    config = replace(config, parallel=parallel, memory=memory)
    return _checked(config, ranks, device)


def _checked(config: BoostConfig, ranks: int, device: str) -> BoostConfig:
    """Return the config as cai's checks leave it: of a batch that fits, for the user's loop says which come."""
    parallel, precision = config.parallel, config.precision
    count = parallel.pipeline.microbatches or 2 * parallel.pipeline.size * parallel.pipeline.chunks
    size = parallel.tensor.size
    batch = parallel.replicate * parallel.shard * size * count
    train = replace(config.train, global_batch=batch, microbatch_size=size, device=device)
    # a loop's own loss scale is right with state in several memories; the check speaks for `Session`
    away = config.memory.residency != "device" and precision.compute == "fp16"
    checked = resolve(
        replace(config, train=train, precision=replace(precision, compute="bf16") if away else precision),
        ranks,
    )
    pipeline = checked.parallel.pipeline
    if pipeline.unshard == "auto":  # a plan would choose; a loop of the user has none
        pipeline = replace(pipeline, unshard="pass")
    parallel = replace(checked.parallel, pipeline=pipeline)
    return replace(checked, precision=precision, parallel=parallel)
