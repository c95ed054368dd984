"""Checks a config against model and ranks and fills in what it leaves open, before any rank starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cai_apps.config import Config
from cai_apps.models import pretrained_directory
from cai_apps.residency import check_memory
from cai_mesh.comm import MeshSpec
from cai_mesh.errors import ConfigError, MeshError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def mesh_spec(config: Config) -> MeshSpec:
    """The mesh a config asks for; `shard` may still be -1."""
    parallel = config.parallel
    return MeshSpec(
        pp=parallel.pipeline.size,
        dp_replicate=parallel.replicate,
        dp_shard=parallel.shard,
        tp=parallel.tensor.size,
    )


def resolve(config: Config, model: PretrainedConfig, world_size: int) -> Config:
    """The config with `shard`, `microbatches` and `decay_steps` filled in for `world_size` ranks.

    Raises:
        MeshError: the degrees do not multiply to `world_size`.
        ConfigError: the model or the batch does not divide as asked, a value is out of range, or settings of `memory`
            do not go together.
    """
    _check_ranges(config)
    shard = mesh_spec(config).resolve(world_size).dp_shard
    config = replace(config, parallel=replace(config.parallel, shard=shard))
    check_memory(config, world_size)
    check_model(config, model)
    if config.precision.linear == "fp8":
        check_fp8(config, model)
    if config.model.weights == "pretrained":
        pretrained_directory(config.model.name)
    pipeline = replace(config.parallel.pipeline, microbatches=microbatches(config))
    schedule = config.lr_schedule
    if schedule.decay_steps is None:
        schedule = replace(schedule, decay_steps=config.train.steps)
    return replace(config, parallel=replace(config.parallel, pipeline=pipeline), lr_schedule=schedule)


def microbatches(config: Config) -> int:
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


def check_model(config: Config, model: PretrainedConfig) -> None:
    """Raises ConfigError when heads, layers or positions do not fit the degrees and the sequence length.

    What a config does not say (a state space model has no heads) is left to the transforms.
    """
    tensor, pipeline = config.parallel.tensor.size, config.parallel.pipeline.size
    heads, layers = (getattr(model, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    if isinstance(heads, int) and heads % tensor:
        raise ConfigError(
            f"{heads} attention heads do not divide over parallel.tensor.size = {tensor}",
            got=f"{heads} / {tensor}",
            expected=f"a size among {_divisors(heads)}",
            fix="choose one of these sizes or a model with more heads",
        )
    key_value = getattr(model, "num_key_value_heads", None) or heads
    if isinstance(key_value, int) and key_value % tensor:
        raise ConfigError(
            f"{key_value} key/value heads do not divide over parallel.tensor.size = {tensor}",
            got=f"{key_value} / {tensor}",
            expected=f"a size among {_divisors(key_value)}",
            fix="choose one of these sizes or a model with more key/value heads",
        )
    if isinstance(layers, int) and layers < pipeline:
        raise ConfigError(
            f"{layers} layers cannot be split over parallel.pipeline.size = {pipeline} stages",
            got=f"{layers} layers",
            expected=f"at most {layers} stages",
            fix=f"set parallel.pipeline.size to {layers} or less",
        )
    positions = getattr(model, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < config.data.sequence_length:  # XLNet says -1: no limit
        raise ConfigError(
            "data.sequence_length is longer than the model's positions",
            got=config.data.sequence_length,
            expected=f"at most {positions} (max_position_embeddings)",
        )


def check_fp8(config: Config, model: PretrainedConfig) -> None:
    """Raises ConfigError where linear layers, or their parts on a tensor-parallel rank, cannot multiply in FP8."""
    if config.precision.compute == "fp64":
        raise ConfigError(
            'precision.linear = "fp8" multiplies what is float32 or bfloat16',
            got='precision.compute = "fp64"',
            expected='"bf16" or "fp32"',
        )
    tensor = config.parallel.tensor.size
    for name in ("hidden_size", "intermediate_size"):
        features = getattr(model, name, None)
        if isinstance(features, int) and features % (16 * tensor):
            raise ConfigError(
                'precision.linear = "fp8" needs features in multiples of 16 on every tensor-parallel rank',
                got=f"{name} {features} over parallel.tensor.size = {tensor}",
                fix='set precision.linear to "compute", or choose another size',
            )


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


def _check_ranges(config: Config) -> None:
    at_least: dict[str, tuple[Any, float]] = {
        "parallel.replicate": (config.parallel.replicate, 1),
        "parallel.tensor.size": (config.parallel.tensor.size, 1),
        "parallel.pipeline.size": (config.parallel.pipeline.size, 1),
        "parallel.pipeline.microbatches": (config.parallel.pipeline.microbatches, 1),
        "data.sequence_length": (config.data.sequence_length, 2),
        "data.limit_bytes": (config.data.limit_bytes, 1),
        "data.validation_fraction": (config.data.validation_fraction, 0),
        "train.steps": (config.train.steps, 1),
        "train.global_batch": (config.train.global_batch, 1),
        "train.microbatch_size": (config.train.microbatch_size, 1),
        "train.validate_every": (config.train.validate_every, 0),
        "train.validation_batches": (config.train.validation_batches, 1),
        "train.seed": (config.train.seed, 0),
        "checkpoint.every": (config.checkpoint.every, 0),
        "checkpoint.keep_last": (config.checkpoint.keep_last, 1),
        "optimizer.lr": (config.optimizer.lr, 0),
        "lr_schedule.warmup_steps": (config.lr_schedule.warmup_steps, 0),
        "lr_schedule.floor": (config.lr_schedule.floor, 0),
        "log.every": (config.log.every, 1),
        "log.sample_tokens": (config.log.sample_tokens, 0),
    }
    for key, (value, smallest) in at_least.items():
        if value is not None and value < smallest:
            raise ConfigError(f"{key} is too small", got=value, expected=f"at least {smallest}")
    if config.data.validation_fraction >= 1:
        raise ConfigError(
            "data.validation_fraction leaves nothing to train on", got=config.data.validation_fraction
        )
    if config.model.weights == "pretrained" and config.data.tokenizer == "train":
        raise ConfigError(
            'model.weights = "pretrained" needs the tokenizer the weights were trained with',
            got='data.tokenizer = "train"',
            fix=f'set data.tokenizer to its directory or hub id, e.g. "{config.model.name}"',
        )
    if config.parallel.shard < 1 and config.parallel.shard != -1:
        raise MeshError(
            "parallel.shard is not a degree", got=config.parallel.shard, expected="at least 1, or -1"
        )


def _divisors(number: int) -> str:
    return ", ".join(str(size) for size in range(1, number + 1) if number % size == 0)
