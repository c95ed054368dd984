"""Checks a config against its ranks and fills in what it leaves open, before any rank starts. Needs no torch."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from typing import TypeVar

from cai_apps.config import ranges
from cai_apps.config.environment import hang_limit, launched
from cai_apps.config.held_out import check_validates
from cai_apps.config.memory import check_memory
from cai_apps.config.optimizer import check_optimizer
from cai_apps.config.precision import check_master
from cai_apps.config.sections import LoRA, LrSchedule, Parallel, Pipeline, RunConfig
from cai_apps.config.steps import check_traces
from cai_mesh.comm import MeshSpec, sub_axes
from cai_mesh.errors import ConfigError, MeshError
from cai_pipeline.plans import limits_of

R = TypeVar("R", bound=RunConfig)
WARMUP = 10
"""Steps of a warm-up unless a config says how many."""


def mesh_spec(config: RunConfig) -> MeshSpec:
    """The mesh a config asks for; `shard` may still be -1."""
    parallel = config.parallel
    return MeshSpec(
        pp=parallel.pipeline.size,
        dp_replicate=parallel.replicate,
        dp_shard=parallel.shard,
        cp=parallel.context.size,
        tp=parallel.tensor.size,
        ep=parallel.experts.size,
        tp_axes=() if parallel.tensor.mode == "1d" else tuple(grid_of(parallel).items()),
    )


def grid_of(parallel: Parallel) -> dict[str, int]:
    """Degrees of the dimensions of a grid of tensor-parallel ranks. Raises PlanError where the mode has no such."""
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


def check_samples(config: RunConfig) -> None:
    """Raises ConfigError where a sample's gradient is not by itself, or not all of it on one rank."""
    if config.optimizer.clip_samples is None:
        return
    parallel, train = config.parallel, config.train
    parts = {name: getattr(parallel, name).size for name in ("tensor", "context", "pipeline")}
    causes = {
        f"train.microbatch_size = {train.microbatch_size}": train.microbatch_size > 1,
        ", ".join(f"{name}.size = {size}" for name, size in parts.items()): max(parts.values()) > 1,
        'precision.compute = "fp16"': config.precision.compute == "fp16",
        f'memory.residency = "{config.memory.residency}" with several samples a step': (
            config.memory.residency != "device" and train.global_batch > 1
        ),
    }
    for cause in (cause for cause, wrong in causes.items() if wrong):
        raise ConfigError(
            "optimizer.clip_samples clips the gradient of one sample, which must be by itself and whole on its rank",
            got=cause,
            expected='microbatch_size 1, all of it on one rank, "bf16" or wider, state on the device',
            fix="change that, or clip the sum alone (optimizer.clip)",
        )


def check_context(config: RunConfig) -> None:
    """Raises ConfigError for rows over ranks where something else cuts samples."""
    size, tensor = config.parallel.context.size, config.parallel.tensor
    if size > 1 and tensor.mode != "1d":
        raise ConfigError(
            "rows over ranks, whose samples a grid of tensor-parallel ranks would cut as well",
            got=f'parallel.context.size = {size}, parallel.tensor.mode = "{tensor.mode}"',
            expected='parallel.tensor.mode = "1d"',
            fix='set parallel.tensor.mode to "1d", or parallel.context.size to 1',
        )


def refuse_context(config: RunConfig, samples: str) -> None:
    """Raises ConfigError where ranks are to have rows together and an application has none.

    Args:
        config: the config.
        samples: the name of its samples.
    """
    size = config.parallel.context.size
    if size > 1:
        raise ConfigError(
            f"a context divides rows of tokens over ranks, and samples are {samples}",
            got=f"parallel.context.size = {size}",
            expected="1",
            fix="raise parallel.shard, and parallel.zero to 3 where memory is short",
        )


def _shards_stages(config: RunConfig) -> bool:
    """Whether the parameters of stages are sharded, and stay on the device."""
    parallel = config.parallel
    return parallel.zero == 3 and config.memory.residency == "device" and parallel.pipeline.size > 1


def _with_unshard(config: R) -> R:
    """The config with `unshard` filled in where it does not depend on memory."""
    pipeline = config.parallel.pipeline
    if pipeline.unshard != "auto":
        return config
    if _shards_stages(config) and not limits_of(pipeline.schedule).split:
        return config
    pipeline = replace(pipeline, unshard="step" if _shards_stages(config) else "pass")
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline))


def check_pipeline(config: RunConfig) -> None:
    """Raises ConfigError for chunks that no rank can have, or not this schedule, and for parameters nobody shards."""
    pipeline = config.parallel.pipeline
    limits = limits_of(pipeline.schedule)
    if pipeline.unshard == "step" and not _shards_stages(config):
        raise ConfigError(
            'parallel.pipeline.unshard = "step" is for stages whose parameters are sharded, and stay on the device',
            got=f"parallel.zero = {config.parallel.zero}, parallel.pipeline.size = {pipeline.size}, "
            f'memory.residency = "{config.memory.residency}"',
            expected='zero = 3, a size of at least 2, residency = "device"',
            fix='set it to "auto"',
        )
    if pipeline.wire != "full" and pipeline.size == 1:
        raise ConfigError(
            "parallel.pipeline.wire says how stages on different ranks send each other tensors, and there is one rank",
            got=f'parallel.pipeline.wire = "{pipeline.wire}", parallel.pipeline.size = 1',
            fix="leave it out",
        )
    waits = config.parallel.zero in (0, 1) or pipeline.unshard == "step"
    if limits.split and pipeline.size > 1 and not (waits and config.memory.residency == "device"):
        raise ConfigError(
            f'the schedule "{pipeline.schedule}" has weight gradients wait, but they would be reduced after every '
            "backward",
            got=f'parallel.zero = {config.parallel.zero}, parallel.pipeline.unshard = "{pipeline.unshard}", '
            f'memory.residency = "{config.memory.residency}"',
            expected='zero 0 or 1, or 3 with unshard = "step"; residency = "device"',
            fix='set one of these, or parallel.pipeline.schedule to "1f1b"',
        )
    if limits.stages == "two" and pipeline.chunks != 2:
        raise ConfigError(
            f'the schedule "{pipeline.schedule}" has two stages on each rank',
            got=f"parallel.pipeline.chunks = {pipeline.chunks}",
            fix="set parallel.pipeline.chunks to 2",
        )
    if pipeline.balance and len(pipeline.balance) != pipeline.size * pipeline.chunks:
        raise ConfigError(
            "parallel.pipeline.balance gives each stage its layers",
            got=f"{len(pipeline.balance)} numbers, parallel.pipeline.size = {pipeline.size}, "
            f"chunks = {pipeline.chunks}",
            expected=f"{pipeline.size * pipeline.chunks} numbers, or none",
        )
    if pipeline.chunks == 1:
        return
    if pipeline.size == 1:
        raise ConfigError(
            "a pipeline of one rank has one stage",
            got=f"parallel.pipeline.size = 1, chunks = {pipeline.chunks}",
            fix="leave parallel.pipeline.chunks out, or raise the size",
        )
    if limits.stages == "one":
        raise ConfigError(
            f'the schedule "{pipeline.schedule}" is for one stage on each rank',
            got=f"parallel.pipeline.chunks = {pipeline.chunks}",
            fix='set parallel.pipeline.schedule to "interleaved", "bfs" or "auto", or leave chunks out',
        )


def check_wire(parallel: Parallel) -> None:
    """Raises ConfigError for compression where nothing is compressed, `shard` being resolved."""
    for name in ("wire_weights", "wire_gradients"):
        if getattr(parallel, name) == "full":
            continue
        if parallel.zero_ranks < 2 or parallel.zero == 0:
            raise ConfigError(
                f"parallel.{name} compresses what travels between ranks that share chunks",
                got=f"parallel.shard = {parallel.shard}, parallel.zero = {parallel.zero}",
                expected="shard of at least 2, or context.size, and zero of at least 1",
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
    return spec.pp * spec.dp_replicate * max(1, spec.dp_shard) * spec.cp * spec.tp


def resolve(config: R, world_size: int) -> R:
    """The config with `shard`, `microbatches` and `decay_steps` filled in for `world_size` ranks, and `unshard`.

    `parallel.zero`, `unshard` and `memory.recompute` may stay "auto", to be settled by the plan.

    Raises:
        MeshError: the degrees do not multiply to `world_size`.
        ConfigError: the batch does not divide as asked, a value is out of range, or settings of `memory` do not go
            together.
    """
    if config.parallel.zero == "auto":
        return _with_open_stage(config, world_size)
    ranges.check(config)
    _check_shard(config)
    shard = mesh_spec(config).resolve(world_size).dp_shard
    config = replace(config, parallel=replace(config.parallel, shard=shard))
    check_memory(config, world_size)
    check_master(config)
    check_validates(config)
    check_optimizer(config.optimizer)
    check_samples(config)
    check_wire(config.parallel)
    check_tensor(config)
    check_context(config)
    config = _with_unshard(config)
    check_pipeline(config)
    pipeline = replace(config.parallel.pipeline, microbatches=microbatches(config))
    _check_enough(pipeline)
    schedule = schedule_of(config)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline), lr_schedule=schedule)


STAGES = (1, 2, 3)
"""Stages of ZeRO that "auto" chooses from, the fastest first: one reduces once a step, three gathers in every pass."""


def _with_open_stage(config: R, world_size: int) -> R:
    """The config resolved but for its ZeRO stage, and `unshard`; wholly, where one stage alone can run."""
    allowed = STAGES if config.memory.residency == "device" else STAGES[-1:]
    found, refusals = [], []
    for zero in allowed:
        try:
            found.append(resolve(replace(config, parallel=replace(config.parallel, zero=zero)), world_size))
        except ConfigError as error:
            refusals.append(error)
    if not found:
        raise refusals[0]
    if len(found) == 1:
        return found[0]
    unshard = config.parallel.pipeline.unshard
    pipeline = replace(found[0].parallel.pipeline, unshard=unshard)
    return replace(found[0], parallel=replace(found[0].parallel, zero="auto", pipeline=pipeline))


def _check_enough(pipeline: Pipeline) -> None:
    """Raises ConfigError where a schedule has too few microbatches."""
    fewest = limits_of(pipeline.schedule).microbatches
    if (pipeline.microbatches or 0) < fewest * pipeline.size:
        raise ConfigError(
            f'the schedule "{pipeline.schedule}" has {fewest} microbatches or more for each pipeline rank',
            got=f"{pipeline.microbatches} microbatches, parallel.pipeline.size = {pipeline.size}",
            expected=f"at least {fewest * pipeline.size}",
            fix='raise train.global_batch, or set parallel.pipeline.schedule to "zb-v"',
        )


def _check_shard(config: RunConfig) -> None:
    if config.parallel.shard == 0:
        raise MeshError(
            "parallel.shard is not a degree", got=0, expected="at least 1, or -1: all ranks that are left"
        )


def schedule_of(config: RunConfig) -> LrSchedule:
    """The schedule of learning rates with `decay_steps` and `warmup_steps` worked out.

    Raises:
        ConfigError: the warm-up is longer than what it leads to.
    """
    schedule = config.lr_schedule
    end = config.train.steps if schedule.decay_steps is None else schedule.decay_steps
    warmup = min(WARMUP, end) if schedule.warmup_steps is None else schedule.warmup_steps
    if warmup > end:
        raise ConfigError(
            "the warm-up is longer than the schedule that it begins",
            got=f"lr_schedule.warmup_steps = {warmup}, {_end(config)}",
            cause="the peak of the learning rate would never be reached",
            fix=f"set lr_schedule.warmup_steps to {end} or less, or leave it out; of a short trial of a long run, set "
            "lr_schedule.decay_steps to the steps of the long one",
        )
    return replace(schedule, decay_steps=end, warmup_steps=warmup)


def _end(config: RunConfig) -> str:
    given = config.lr_schedule.decay_steps
    return f"train.steps = {config.train.steps}" if given is None else f"lr_schedule.decay_steps = {given}"


def check_adapters(config: RunConfig, lora: LoRA, *, weights: str) -> None:
    """Raises ConfigError where adapters do not go with the rest of a config.

    Args:
        config: the config.
        lora: its options of adapters.
        weights: the weights beside which they stand: "random" or "pretrained".
    """
    if not lora.rank:
        if lora != type(lora)():
            raise ConfigError(
                "options of adapters, but lora.rank is 0",
                got=", ".join(
                    f"lora.{key} = {value!r}" for key, value in asdict(lora).items() if key != "rank"
                ),
                fix="set lora.rank, usually to a number from 4 to 64; or leave them out",
            )
        return
    tensor = config.parallel.tensor
    if tensor.size > 1 and tensor.mode != "1d":
        raise ConfigError(
            "adapters beside layers that a grid of ranks cuts",
            got=f'parallel.tensor.mode = "{tensor.mode}", lora.rank = {lora.rank}',
            cause="the few features between the layers of an adapter do not divide over a grid",
            fix='set parallel.tensor.mode to "1d"',
        )
    if tensor.size > 1 and tensor.sequence and lora.dropout:
        raise ConfigError(
            "adapters that drop inputs, where tensor-parallel ranks cut the sequence",
            got=f"parallel.tensor.sequence = true, lora.dropout = {lora.dropout}",
            cause="inputs of some layers are cut along the sequence, and of others whole",
            fix="leave parallel.tensor.sequence out, or set lora.dropout to 0",
        )
    if weights == "random":
        raise ConfigError(
            "adapters over random weights",
            got=f'model.weights = "random", lora.rank = {lora.rank}',
            cause="layers that start at zero, the last among them, would stay there: nothing could be learned",
            fix='set model.weights to "pretrained", and model.name to a directory or a hub id',
        )


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


def check(config: RunConfig) -> None:
    """Raises CaiError for what can be told of a config before GPUs are counted: all, unless `shard` is open."""
    ranges.check(config)
    check_validates(config)
    _check_shard(config)
    hang_limit()
    if launched() or config.parallel.shard != -1:
        ranks = int(os.environ["WORLD_SIZE"]) if launched() else ranks_of(config)
        resolve(config, ranks)
        check_traces(config, ranks)
