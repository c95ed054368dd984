"""Models that classify: those of transformers for texts and for pictures, and what fills them from published files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from cai_apps.compose.blocks import blocks_of
from cai_apps.compose.lora import add_adapters, plain_name, targets_of
from cai_apps.compose.models import load_model_config, without_values
from cai_apps.compose.published_names import present_tensors
from cai_mesh.checkpoint import load_hf
from cai_mesh.errors import CheckpointError, ConfigError
from cai_mesh.files import weight_files

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

    from cai_apps.config.sections import LoRA

Kind = Literal["texts", "pictures"]
POOLER = ".pooler."
"""A part of BERT's layers that its models of masked words do not have."""
SHOWN = 4
"""Names that an error shows."""


def kind_of(config: PretrainedConfig, name: str) -> Kind:
    """Return what a model of a config classifies.

    Args:
        config: the model's config.
        name: the name that it was found by.

    Raises:
        ConfigError: transformers has no model of this kind that classifies either.
    """
    from transformers import (
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING,
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    )

    if type(config) in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        return "texts"
    if type(config) in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
        return "pictures"
    raise ConfigError(
        f"{name} classifies neither texts nor pictures",
        got=f"model_type {config.model_type!r}",
        expected="one that AutoModelForSequenceClassification or AutoModelForImageClassification of transformers makes",
    )


def side_of(config: PretrainedConfig, name: str) -> int:
    """Return the side of the square, in pixels, that a model of pictures sees.

    Raises:
        ConfigError: it sees no squares of three colours, or does not say how large they are.
    """
    vision: Any = getattr(config, "vision_config", config)  # CLIP's and SigLIP's have one of texts beside it
    side, colours = getattr(vision, "image_size", 224), getattr(vision, "num_channels", 3)
    if isinstance(side, (list, tuple)) and len(set(side)) == 1:
        side = side[0]
    if not isinstance(side, int) or colours != 3:
        raise ConfigError(
            f"{name} sees other pictures than squares of three colours",
            got=f"image_size {side}, num_channels {colours}",
            expected="a number as image_size, and 3 num_channels",
        )
    return side


def longest_of(config: PretrainedConfig) -> int:
    """Return the tokens of the longest text that a model takes."""
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 2**31
    if text.model_type in ("roberta", "xlm-roberta", "camembert", "longformer", "mpnet", "roformer"):
        most -= 2  # positions of theirs begin behind the one that fills texts up
    return int(most)


def own_classes(config: PretrainedConfig, weights: str) -> dict[int, str] | None:
    """Return the names of a pretrained model's classes by number; None: it has none of its own."""
    names = {int(number): str(name) for number, name in (config.id2label or {}).items()}
    return None if weights != "pretrained" or sorted(names) != list(range(len(names))) else names


def config_for(name: str, classes: Sequence[str], padding: int | None = None) -> PretrainedConfig:
    """Return the config of a model of these classes.

    Args:
        name: the name that the model's config is found by.
        classes: names of the classes.
        padding: the id that fills texts up; None: that of the config.
    """
    config: Any = load_model_config(name)
    config.id2label = dict(enumerate(classes))
    config.label2id = {label: number for number, label in enumerate(classes)}
    config.problem_type = "single_label_classification"
    if padding is not None:
        config.get_text_config().pad_token_id = config.pad_token_id = padding
    return config


def build(config: PretrainedConfig, kind: Kind) -> PreTrainedModel:
    """Return the model of a config, on the device of the context."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    make: Any = AutoModelForSequenceClassification if kind == "texts" else AutoModelForImageClassification
    return without_values(make.from_config(config, trust_remote_code=False))


def on_meta(config: PretrainedConfig, kind: Kind) -> PreTrainedModel:
    """Return the model of a config without memory."""
    with torch.device("meta"):
        return build(config, kind)


def with_adapters(
    config: PretrainedConfig, kind: Kind, lora: LoRA, directory: Path | None
) -> PreTrainedModel:
    """Return the model of a config with what is asked for of adapters, on the device of the context.

    Args:
        config: the config of the model.
        kind: texts or pictures.
        lora: options of the adapters.
        directory: the directory of the pretrained weights; None where there are no adapters.

    Raises:
        ConfigError: adapters are asked for beside layers that can have none; or the model keeps statistics of batches.
    """
    model = build(config, kind)
    if lora.rank:
        assert directory is not None, "adapters stand beside pretrained weights"
        _check_no_statistics(model)
        learned = learned_beside(model, directory)
        add_adapters(model, lora, targets_of(model, lora, learned), learned)
    return model


def body_of(model: PreTrainedModel) -> str:
    """Return the name of the part of a model that is below its head: by its prefix, or else by the blocks in it.

    CLIP's and SigLIP's models that classify have no part of the name of their prefix.

    Raises:
        ConfigError: the head cannot be told from the layers below it.
    """
    children = [name for name, child in model.named_children() if next(child.parameters(), None) is not None]
    block_ids = {id(block) for block in blocks_of(model)}
    body = model.base_model_prefix
    if body not in children and len(children) == 2:  # layers, then one that is the head
        first = model.get_submodule(children[0]).modules()
        body = children[0] if block_ids & {id(module) for module in first} else body
    if body not in children or any(True for _ in model.parameters(recurse=False)):
        raise ConfigError(
            f"the head of {type(model).__name__} cannot be told from the layers below it",
            got=f"the parts {', '.join(children)}",
            expected=f"one part with all other layers, such as {body!r}, and the head beside it",
            fix="take another model, or random weights",
        )
    return body


def learned_beside(model: PreTrainedModel, directory: Path) -> tuple[str, ...]:
    """Return the names of the modules that learn whole beside adapters: the head, and a pooler that the files lack.

    What the files lack begins at random: it would be lost with a run's end if it did not learn.

    Args:
        model: the model without adapters.
        directory: the directory of the pretrained weights.

    Raises:
        ConfigError: its head cannot be told from the layers below it.
    """
    body = body_of(model)
    heads = [
        name
        for name, child in model.named_children()
        if name != body and next(child.parameters(), None) is not None
    ]
    if any(POOLER in f".{name}" for name in weight_files(directory).tensors):
        return tuple(heads)
    poolers = [
        name
        for name, module in model.named_modules()
        if name.endswith(POOLER[:-1]) and next(module.parameters(), None) is not None
    ]
    return (*poolers, *heads)


def _check_no_statistics(model: nn.Module) -> None:
    """Raise ConfigError for a model whose frozen layers would go on to learn means and variances of batches."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.track_running_stats:
            raise ConfigError(
                "adapters beside a base that keeps means and variances of batches",
                got=f"{name}, a {type(module).__name__} of {type(model).__name__}",
                cause="they would go on to change, and no folder of adapters has them",
                fix="train all weights (lora.rank = 0), or take a model without such layers",
            )


def pretrained(
    name: str, directory: Path, config: PretrainedConfig, kind: Kind
) -> Callable[[nn.Module], None]:
    """Return what fills a model from the files of a directory, a head of other classes excepted.

    Args:
        name: the name that the model's config is found by.
        directory: the directory of its files.
        config: the config with the classes that are trained.
        kind: texts or pictures.

    Raises:
        CheckpointError: the files lack more than a head; raised by the function.
        ConfigError: the head cannot be told from the layers below it; raised by the function.
    """
    stored: Any = load_model_config(name)
    same_classes = dict(stored.id2label or {}) == dict(config.id2label or {})

    def load(model: nn.Module) -> None:
        plain: Any = on_meta(config, kind)
        inner = f"{body_of(plain)}."
        heads = {parameter for parameter, _ in plain.named_parameters() if not parameter.startswith(inner)}
        new = frozenset() if same_classes else heads

        def stored_name(parameter: str) -> str | None:
            name = plain_name(parameter)
            return None if name in new else name

        tensors = partial(present_tensors, plain)
        absent = load_hf(model, directory, names=stored_name, tensors=tensors, strict=False)
        missing = [parameter for parameter in absent if parameter not in heads and POOLER not in parameter]
        if missing:
            raise CheckpointError(
                f"{directory} lacks weights of its model",
                got=", ".join(missing[:SHOWN]),
                cause="they would be random numbers",
                fix="check that config.json is the one these weights were made with",
            )

    return load


def is_new_head(name: str, classes: Sequence[str]) -> bool:
    """Return whether a model's own classes are others than these, so that its head begins anew."""
    stored: Any = load_model_config(name)
    return {int(number): label for number, label in (stored.id2label or {}).items()} != dict(
        enumerate(classes)
    )
