"""Rules that a config of a language model must keep. They need neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from cai_apps.applications.language.config import Config
from cai_apps.compose.models import read_model_config
from cai_apps.config import validation
from cai_apps.config.adapters import read_adapter
from cai_apps.config.held_out import check_validation
from cai_apps.config.ranges import NATURAL, POSITIVE, SHARE, Range
from cai_apps.data.section import Data
from cai_mesh.errors import ConfigError

NAMES = {
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
    "n_embd": "hidden_size",
}
"""Keys of a config.json of GPT-2 and those like it, to those of others."""


def check(config: Config) -> None:
    """Raises CaiError for what can be told of a config before anything is loaded. Downloads a hub id's config.json."""
    validation.check(config)
    config = with_adapter(config)
    check_settings(config)
    table = read_model_config(config.model.name)
    check_numbers(table)
    check_model(config, SimpleNamespace(**{NAMES.get(key, key): value for key, value in table.items()}))


def with_adapter(config: Config) -> Config:
    """Return a config whose options of adapters are those of the adapter that it goes on from, if it names one.

    Raises:
        ConfigError: the folder holds none that can be gone on with, or the config asks for something else.
    """
    lora = config.lora
    if lora.adapter is None:
        return config
    adapter = read_adapter(lora.adapter)
    of_adapter = {
        "rank": adapter.rank,
        "alpha": adapter.alpha,
        "rank_stabilized": adapter.rank_stabilized,
        "dora": adapter.dora,
        "targets": adapter.targets,
        "modules_to_save": adapter.modules,
    }
    choices = {key: value for key in of_adapter if (value := getattr(lora, key))}
    for key, value in choices.items():
        if (set(value) != set(of_adapter[key])) if isinstance(value, tuple) else value != of_adapter[key]:
            raise ConfigError(
                f"lora.{key} is not that of the adapter that training goes on from",
                got=f"{value!r}, and {of_adapter[key]!r} in {lora.adapter}",
                fix=f"leave lora.{key} out, or lora.adapter for a new adapter",
            )
    return replace(config, lora=replace(lora, **of_adapter))


def check_settings(config: Config) -> None:
    """Raises ConfigError for what does not go together, whatever the model is."""
    if config.model.weights == "pretrained" and config.data.tokenizer == "train":
        raise ConfigError(
            'model.weights = "pretrained" needs the tokenizer the weights were trained with',
            got='data.tokenizer = "train"',
            fix='set data.tokenizer to "auto", which takes that of model.name',
        )
    if config.data.format == "chat" and config.data.boundaries == "ignore":
        raise ConfigError(
            'data.format = "chat" keeps conversations apart',
            got='data.boundaries = "ignore"',
            expected='"keep"',
        )
    check_texts(config)
    check_noise(config)
    check_experts(config)
    check_rows(config)
    if joined := next((target for target in config.lora.targets if "," in target), None):
        raise ConfigError(
            "lora.targets are several names, and this is one with a comma",
            got=repr(joined),
            fix=f"--lora.targets {' '.join(part.strip() for part in joined.split(','))}, or a list in a file",
        )
    if config.log.prompts and not (config.train.validate_every and config.log.sample_tokens):
        raise ConfigError(
            "log.prompts are continued after each validation",
            got=f"train.validate_every = {config.train.validate_every}, log.sample_tokens ="
            f" {config.log.sample_tokens}",
            expected="both above 0",
        )
    validation.check_adapters(config, config.lora, weights=config.model.weights)
    check_base(config)
    is_apart = config.data.validation_source is not None
    check_validation(config, 1.0 if is_apart else config.data.validation_fraction)


def check_texts(config: Config) -> None:
    """Raises ConfigError where options of a source do not go together."""
    data = config.data
    if data.format == "chat" and data.text_column != "text":
        raise ConfigError(
            "data.text_column is for documents of text",
            got=f'data.text_column = "{data.text_column}", data.format = "chat"',
            cause="the keys of a record of messages are those of its form",
            fix="leave it out, or rename the columns",
        )
    if not data.streaming and data.shuffle_buffer != Data().shuffle_buffer:
        raise ConfigError(
            "data.shuffle_buffer mixes a stream",
            got=f"data.shuffle_buffer = {data.shuffle_buffer}, data.streaming = false",
            cause="what is tokenized before a run is read in an order of all of it",
            fix="leave it out, or set data.streaming to true",
        )
    if not data.streaming:
        return
    conflicts = {
        'data.format = "chat"': data.format == "chat",
        'data.boundaries = "keep"': data.boundaries == "keep",
        'data.tokenizer = "train"': data.tokenizer == "train"
        or (data.tokenizer == "auto" and config.model.weights == "random"),
        f"train.validate_every = {config.train.validate_every} without data.validation_source": bool(
            config.train.validate_every and data.validation_source is None
        ),
    }
    conflict = next((name for name, holds in conflicts.items() if holds), None)
    if conflict is not None:
        raise ConfigError(
            "a stream of text is tokenized as it is read, and nothing of it is known before",
            got=f"data.streaming = true, {conflict}",
            expected="text, rows that documents run through, a tokenizer, and a source of its own for validation",
            fix="change that option, or leave data.streaming out",
        )


def check_base(config: Config) -> None:
    """Raises ConfigError where a quantized base does not go with the rest of a config."""
    if config.lora.base == "compute":
        return
    parallel, precision = config.parallel, config.precision
    conflicts = {
        f"parallel.tensor.size = {parallel.tensor.size}": parallel.tensor.size > 1,
        "parallel.zero = 3": parallel.zero == 3,
        f'memory.residency = "{config.memory.residency}"': config.memory.residency != "device",
        f'precision.linear = "{precision.linear}"': precision.linear != "compute",
    }
    conflict = next((name for name, holds in conflicts.items() if holds), None)
    if conflict is not None:
        raise ConfigError(
            "a quantized base is whole on every rank of its stage, on the device",
            got=f'lora.base = "{config.lora.base}", {conflict}',
            expected="data ranks of stages 0 to 2, or pipeline stages",
            fix='change that option, or set lora.base to "compute"',
        )


def check_noise(config: Config) -> None:
    """Raises ConfigError where noise on the embeddings does not go with the rest of a config."""
    alpha, mode = config.model.neftune_alpha, config.parallel.tensor.mode
    if alpha and mode != "1d":
        raise ConfigError(
            "noise on embeddings whose features are cut over ranks",
            got=f'model.neftune_alpha = {alpha}, parallel.tensor.mode = "{mode}"',
            expected='parallel.tensor.mode = "1d", whose ranks have whole embeddings',
            fix="set model.neftune_alpha to 0, or the mode to that",
        )
    size = config.parallel.context.size
    if alpha and size > 1:
        raise ConfigError(
            "noise on embeddings is drawn for whole rows, and ranks have parts of them",
            got=f"model.neftune_alpha = {alpha}, parallel.context.size = {size}",
            fix="set model.neftune_alpha to 0, or raise parallel.shard in place of the context",
        )


def check_rows(config: Config) -> None:
    """Raises ConfigError where rows do not divide over the ranks that have them together."""
    size, length = config.parallel.context.size, config.data.sequence_length
    tensor = config.parallel.tensor
    multiple = 2 * size * (tensor.size if tensor.sequence else 1)
    if size > 1 and length % multiple:
        raise ConfigError(
            "a rank of a context has two pieces of each row",
            got=f"data.sequence_length = {length}, parallel.context.size = {size}"
            + (f", parallel.tensor.size = {tensor.size} with sequence" if tensor.sequence else ""),
            expected=f"a multiple of {multiple}",
            fix=f"set data.sequence_length to {-(-length // multiple) * multiple}",
        )


def check_experts(config: Config) -> None:
    """Raises ConfigError where a grid of ranks cuts the tokens that routers are to be balanced by."""
    experts, mode = config.experts, config.parallel.tensor.mode
    options = [name for name in ("aux_loss", "z_loss", "bias_update", "show") if getattr(experts, name)]
    if options and mode != "1d":
        raise ConfigError(
            "routers on a grid of ranks see other tokens on each",
            got=f'experts.{options[0]} = {getattr(experts, options[0])}, parallel.tensor.mode = "{mode}"',
            expected='parallel.tensor.mode = "1d"',
            fix=f"set experts.{options[0]} to 0, or the mode to that",
        )


def _some_each(config: Config, heads: int, ranks: int) -> bool:
    """Whether the heads divide over the ranks, or in mode 1d leave each rank some in runs, the last one shorter."""
    uneven = config.parallel.tensor.mode == "1d" and heads > (ranks - 1) * -(-heads // ranks)
    return heads % ranks == 0 or uneven


def check_model(config: Config, model: Any) -> None:
    """Raises ConfigError when heads, layers or positions do not fit the degrees and the sequence length.

    `model` is a config of transformers, or has its values.

    What a config does not say (a state space model has no heads) is left to the transforms, and so are key/value heads,
    which ranks can share.
    """
    if config.precision.linear == "fp8":
        check_fp8(config, model)
    check_rotary(config, model)
    tensor, pipeline = validation.sharing_features(config.parallel), config.parallel.pipeline
    heads, layers = (getattr(model, name, None) for name in ("num_attention_heads", "num_hidden_layers"))
    if isinstance(heads, int) and not _some_each(config, heads, tensor):
        raise ConfigError(
            f"{heads} attention heads do not divide over the ranks that share features",
            got=f"{heads} / {tensor}, of parallel.tensor.size = {config.parallel.tensor.size}",
            expected=f"a size among {', '.join(str(n) for n in range(1, heads + 1) if _some_each(config, heads, n))}",
            fix="choose one of these sizes or a model with more attention heads",
        )
    context = config.parallel.context
    divides = not isinstance(heads, int) or heads % (tensor * context.size) == 0
    if context.size > 1 and context.mode == "ulysses" and not divides:
        raise ConfigError(
            f"{heads} attention heads do not divide over the ranks of a context",
            got=f'parallel.context = {{ size = {context.size}, mode = "ulysses" }}, tensor-parallel ranks: {tensor}',
            expected=f"a divisor of {heads}",
            fix='set parallel.context.mode to "gather", or another size',
        )
    if config.parallel.tensor.sequence and config.data.sequence_length % tensor:
        raise ConfigError(
            "parallel.tensor.sequence cuts sequences over the tensor-parallel ranks",
            got=f"data.sequence_length = {config.data.sequence_length} over {tensor} ranks",
            expected=f"a multiple of {tensor}",
        )
    if isinstance(layers, int) and layers < pipeline.size * pipeline.chunks:
        raise ConfigError(
            f"{layers} layers cannot be split into so many pipeline stages",
            got=f"parallel.pipeline.size = {pipeline.size}, chunks = {pipeline.chunks}: "
            f"{pipeline.size * pipeline.chunks} stages",
            expected=f"at most {layers} stages",
            fix="set one of them lower",
        )
    if isinstance(layers, int) and pipeline.balance and sum(pipeline.balance) != layers:
        raise ConfigError(
            "parallel.pipeline.balance does not divide the model's layers",
            got=f"{sum(pipeline.balance)} layers in all",
            expected=f"{layers}",
        )
    positions = getattr(model, "max_position_embeddings", None)
    if isinstance(positions, int) and 0 < positions < config.data.sequence_length:  # XLNet says -1: no limit
        raise ConfigError(
            "data.sequence_length is longer than the model's positions",
            got=config.data.sequence_length,
            expected=f"at most {positions} (max_position_embeddings)",
        )


def check_rotary(config: Config, model: Any) -> None:
    """Raises ConfigError where documents of a row would change each other's positions.

    Longrope (arXiv:2402.13753) has other factors once the longest position of a batch is beyond those that the model
    was first trained with.
    """
    rotary = getattr(model, "rope_parameters", None) or getattr(model, "rope_scaling", None)
    data = config.data
    keeps = data.boundaries == "keep" or (data.boundaries == "auto" and data.format == "chat")
    if not keeps or not isinstance(rotary, Mapping):
        return
    key = "original_max_position_embeddings"
    first = rotary.get(key) or getattr(model, key, None)
    longrope = "longrope" in (rotary.get("rope_type"), rotary.get("type"))
    if longrope and isinstance(first, int) and data.sequence_length > first:
        raise ConfigError(
            "a long document in a row would change the rotary factors of the others",
            got=f"data.sequence_length = {data.sequence_length}, longrope from {first} positions on",
            cause="the model takes its factors by the longest position of a batch",
            fix=f"set data.sequence_length to {first} or less",
        )


LARGEST = 2**31
NUMBERS: dict[str, Range] = {
    r".*dropout.*|.*_pdrop|.*layerdrop|.*drop_(rate|path).*": SHARE,
    r".*_eps(ilon)?|initializer_range|init_std": NATURAL,
    r"rope_theta|rotary_emb_base": POSITIVE,
    r"(n|num)_.*layers?|(encoder|decoder)_layers|.*_blocks": Range(least=0, most=20_000),
    r".*_experts": Range(least=0, most=10**6),
    r"max_(position_embeddings|sequence_length|seq_len)|n_(positions|ctx)": Range(most=10**9),
    r"(?:num_)?hidden_(?:size|layers)|num_(?:attention|key_value)_heads|vocab_size": Range(
        least=1, below=LARGEST
    ),
    r"intermediate_size": Range(least=0, below=LARGEST),  # models of experts alone have none
}
"""Ranges of numbers in a config.json, by patterns of their keys. A table that says more is made and never ends: each
layer is an object, also of a model that takes no memory."""


def check_numbers(table: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number of a config.json of which no model can be."""
    for key, value in _numbers(table):
        name = NAMES.get(key, key)
        allowed = next((range_ for pattern, range_ in NUMBERS.items() if re.fullmatch(pattern, name)), None)
        if allowed is not None and (fault := allowed.fault(value)):
            raise ConfigError(
                f"the model's config.json says {key} = {value}",
                got=f"a number that {fault}",
                expected=str(allowed),
            )
    heads, shared = table.get("num_attention_heads"), table.get("num_key_value_heads")
    if isinstance(heads, int) and isinstance(shared, int) and shared and heads % shared:
        raise ConfigError(
            "the heads of the model's config.json do not divide over those of keys and values",
            got=f"num_attention_heads = {heads}, num_key_value_heads = {shared}",
            expected="a multiple",
        )


def _numbers(table: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of a table, and of the tables in it, by key."""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield str(key), value


def check_fp8(config: Config, model: Any) -> None:
    """Raises ConfigError where linear layers, or their parts on a tensor-parallel rank, cannot multiply in FP8."""
    if config.precision.compute not in ("fp32", "bf16"):
        raise ConfigError(
            'precision.linear = "fp8" multiplies what is float32 or bfloat16',
            got=f'precision.compute = "{config.precision.compute}"',
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
