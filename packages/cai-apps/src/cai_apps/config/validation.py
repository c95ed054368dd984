"""Checks a config against its ranks and fills in what it leaves open, before any rank starts."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from cai_apps.config.memory import check_memory
from cai_apps.config.sections import Optimizer, Parallel, RunConfig
from cai_mesh.comm import MeshSpec
from cai_mesh.errors import ConfigError, MeshError

R = TypeVar("R", bound=RunConfig)
TAKES = {
    "adamw": ("beta1", "beta2", "eps", "state"),
    "muon": ("adamw_lr", "momentum", "beta1", "beta2", "eps"),
    "lamb": ("beta1", "beta2", "eps"),
    "lars": ("momentum",),
    "adafactor": (),
    "came": ("beta1", "beta2"),
}
"""The options of each kind of optimizer, beside its rate and decay."""
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def mesh_spec(config: RunConfig) -> MeshSpec:
    """The mesh a config asks for; `shard` may still be -1."""
    parallel = config.parallel
    return MeshSpec(
        pp=parallel.pipeline.size,
        dp_replicate=parallel.replicate,
        dp_shard=parallel.shard,
        tp=parallel.tensor.size,
        tp_axes=() if parallel.tensor.mode == "1d" else tuple(grid_of(parallel).items()),
    )


def grid_of(parallel: Parallel) -> dict[str, int]:
    """Degrees of the dimensions of a grid of tensor-parallel ranks. Raises PlanError where the mode has no such."""
    from cai_tensor_parallel import sub_axes  # with torch, which reading a config does without

    tensor = parallel.tensor
    return sub_axes(tensor.mode, tensor.size, 2 if tensor.depth is None else tensor.depth)


def sharing_features(parallel: Parallel) -> int:
    """How many tensor-parallel ranks cut features between them: a side of a grid, all of them in mode 1d."""
    if parallel.tensor.mode == "1d":
        return parallel.tensor.size
    *_, side = grid_of(parallel).values()
    return side


def check_tensor(config: RunConfig) -> None:
    """Raises ConfigError for a grid of tensor-parallel ranks that cannot run as asked, `shard` being resolved."""
    tensor, train = config.parallel.tensor, config.train
    if tensor.depth is not None and tensor.mode != "2.5d":
        raise ConfigError(
            'parallel.tensor.depth is for parallel.tensor.mode = "2.5d"',
            got=f'depth {tensor.depth}, mode "{tensor.mode}"',
        )
    if tensor.overlap == "on" and not tensor.sequence:
        raise ConfigError(
            'parallel.tensor.overlap = "on" is for sequences that are cut',
            got="parallel.tensor.sequence = false",
            fix='set parallel.tensor.sequence to true, or overlap to "auto"',
        )
    if tensor.mode == "1d":
        return
    if train.compile == "on":
        raise ConfigError(
            'train.compile = "on" makes one graph of a block',
            got=f'parallel.tensor.mode = "{tensor.mode}"',
            cause="the products of a grid look up groups of ranks while they run",
            fix='set train.compile to "off" or "auto", or parallel.tensor.mode to "1d"',
        )
    if config.memory.recompute == "selective":
        raise ConfigError(
            'memory.recompute = "selective" keeps the results of products',
            got=f'parallel.tensor.mode = "{tensor.mode}"',
            cause="a grid of ranks makes a product in steps, in place: what is kept would be a step of it",
            fix='set memory.recompute to "most" or "full"',
        )
    if tensor.sequence or config.precision.linear == "fp8":
        raise ConfigError(
            f'parallel.tensor.mode = "{tensor.mode}" cuts samples and features from the embedding to the head',
            got=f'parallel.tensor.sequence = {tensor.sequence}, precision.linear = "{config.precision.linear}"',
            expected='no sequence, linear layers that are not "fp8"',
            fix='leave these out, or parallel.tensor.mode = "1d"',
        )
    cut = tensor.size // sharing_features(config.parallel)
    if train.microbatch_size % cut:
        raise ConfigError(
            f'parallel.tensor.mode = "{tensor.mode}" cuts the samples of a microbatch over {cut} ranks',
            got=f"train.microbatch_size = {train.microbatch_size}",
            expected=f"a multiple of {cut}",
        )


def check_optimizer(options: Optimizer) -> None:
    """Raises ConfigError for options that the kind of optimizer has no use for: none is silently left out."""
    if options.ema_decay is not None and not 0 <= options.ema_decay < 1:
        raise ConfigError(
            "optimizer.ema_decay is no decay", got=options.ema_decay, expected="at least 0, below 1"
        )
    usual, takes = Optimizer(), TAKES[options.kind]
    for name in ("adamw_lr", "beta1", "beta2", "eps", "momentum", "state"):
        if name not in takes and getattr(options, name) != getattr(usual, name):
            raise ConfigError(
                f'optimizer.{name} does nothing with optimizer.kind = "{options.kind}"',
                got=getattr(options, name),
                expected=f"options of {options.kind}: lr, weight_decay, {', '.join(takes)}".rstrip(", "),
            )
    if options.clip_samples is not None and options.clip_samples <= 0:
        raise ConfigError("optimizer.clip_samples is not positive", got=options.clip_samples)
    for group, own in options.groups.items():
        if own.adamw and options.kind != "muon":
            raise ConfigError(
                f'optimizer.groups.{group}.adamw does nothing with optimizer.kind = "{options.kind}"',
                expected='optimizer.kind = "muon"',
            )


def check_samples(config: RunConfig) -> None:
    """Raises ConfigError where a sample's gradient is not by itself, or not all of it on one rank."""
    if config.optimizer.clip_samples is None:
        return
    parallel, train = config.parallel, config.train
    several = parallel.tensor.size * parallel.pipeline.size > 1
    causes = {
        f"train.microbatch_size = {train.microbatch_size}": train.microbatch_size > 1,
        f"tensor.size = {parallel.tensor.size}, pipeline.size = {parallel.pipeline.size}": several,
        'precision.compute = "fp16"': config.precision.compute == "fp16",
        f'memory.residency = "{config.memory.residency}" with several samples a step': (
            config.memory.residency != "device" and train.global_batch > 1
        ),
    }
    for cause in (cause for cause, wrong in causes.items() if wrong):
        raise ConfigError(
            "optimizer.clip_samples clips the gradient of one sample, which must be by itself and whole on its rank",
            got=cause,
            expected='microbatch_size 1, no tensor ranks or stages, "bf16" or wider, state on the device',
            fix="change that, or clip the sum alone (optimizer.clip)",
        )


def check_wire(parallel: Parallel) -> None:
    """Raises ConfigError for compression where nothing is compressed, `shard` being resolved."""
    for name in ("wire_weights", "wire_gradients"):
        if getattr(parallel, name) == "full":
            continue
        if parallel.shard < 2 or parallel.zero == 0:
            raise ConfigError(
                f"parallel.{name} compresses what travels between ranks that share chunks",
                got=f"parallel.shard = {parallel.shard}, parallel.zero = {parallel.zero}",
                expected="shard of at least 2 and zero of at least 1",
            )
    if parallel.wire_weights != "full" and parallel.copy_engines == "on":
        raise ConfigError(
            "compressed weights cannot be gathered by copy engines, which copy shards as they are",
            got=f'parallel.wire_weights = "{parallel.wire_weights}", parallel.copy_engines = "on"',
            fix='set parallel.copy_engines to "off", or parallel.wire_weights to "full"',
        )


def ranks_of(config: RunConfig) -> int:
    """As many ranks as the degrees make, an open `shard` taken as 1."""
    spec = mesh_spec(config)
    return spec.pp * spec.dp_replicate * max(1, spec.dp_shard) * spec.tp


def resolve(config: R, world_size: int) -> R:
    """The config with `shard`, `microbatches` and `decay_steps` filled in for `world_size` ranks.

    Raises:
        MeshError: the degrees do not multiply to `world_size`.
        ConfigError: the batch does not divide as asked, a value is out of range, or settings of `memory` do not go
            together.
    """
    check_ranges(config, RANGES)
    if config.parallel.shard < 1 and config.parallel.shard != -1:
        raise MeshError(
            "parallel.shard is not a degree", got=config.parallel.shard, expected="at least 1, or -1"
        )
    shard = mesh_spec(config).resolve(world_size).dp_shard
    config = replace(config, parallel=replace(config.parallel, shard=shard))
    check_memory(config, world_size)
    check_optimizer(config.optimizer)
    check_samples(config)
    check_wire(config.parallel)
    check_tensor(config)
    pipeline = replace(config.parallel.pipeline, microbatches=microbatches(config))
    schedule = config.lr_schedule
    if schedule.decay_steps is None:
        schedule = replace(schedule, decay_steps=config.train.steps)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline), lr_schedule=schedule)


def microbatches(config: RunConfig) -> int:
    """Microbatches of a data rank in one step; the batch sizes must agree exactly.

    Raises:
        ConfigError: they do not.
    """
    train, parallel = config.train, config.parallel
    per_pass = parallel.replicate * parallel.shard * train.microbatch_size
    given = parallel.pipeline.microbatches
    found, left = divmod(train.global_batch, per_pass)
    if left or (given is not None and given != found):
        whole = per_pass * (given or max(1, round(train.global_batch / per_pass)))
        count = "any number of microbatches" if given is None else f"microbatches {given}"
        raise ConfigError(
            "batch sizes disagree",
            got=f"train.global_batch = {train.global_batch}",
            expected=f"replicate {parallel.replicate} * shard {parallel.shard}"
            f" * microbatch_size {train.microbatch_size} * {count}",
            fix=f"set train.global_batch to {whole}",
        )
    return found


def launched(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether a launcher started this process as one of its ranks.

    Raises:
        ConfigError: only some of the variables a launcher sets are there.
    """
    if "RANK" not in environment:
        return False
    missing = [name for name in LAUNCHER_VARIABLES if name not in environment]
    if missing:
        raise ConfigError(
            f"RANK is set but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not",
            got=f"RANK={environment['RANK']}",
            expected=", ".join(LAUNCHER_VARIABLES),
            cause="a launcher sets all four; RANK alone is often left over from another program",
            fix="unset RANK to let cai start the ranks, or start them with `cai run`, torchrun or srun",
        )
    return True


RANGES = {
    "parallel.replicate": 1,
    "parallel.tensor.size": 1,
    "parallel.pipeline.size": 1,
    "parallel.pipeline.microbatches": 1,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "train.validation_batches": 1,
    "train.seed": 0,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "optimizer.lr": 0,
    "lr_schedule.warmup_steps": 0,
    "lr_schedule.floor": 0,
    "log.every": 1,
}
"""The smallest value of numbers in a config, by dotted key."""


def check_ranges(config: Any, smallest: Mapping[str, float]) -> None:
    """Raises ConfigError for a number below the one in `smallest`."""
    for key, least in smallest.items():
        value = functools.reduce(getattr, key.split("."), config)
        if value is not None and value < least:
            raise ConfigError(f"{key} is too small", got=value, expected=f"at least {least}")
