"""The model of a run: as transformers makes it, with the run's attention, noise and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import nn

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.noise import EmbeddingNoise, embedding_of
from cai_apps.compose import models
from cai_apps.compose.blocks import blocks_of
from cai_apps.compose.documents import document_rule
from cai_apps.compose.dora import is_linear
from cai_apps.compose.lora import (
    add_adapters,
    initialize,
    inside,
    is_adapter,
    learned_modules,
    matching,
)
from cai_apps.compose.routing.finding import need_routers
from cai_apps.compose.routing.precision import in_float32
from cai_mesh.attention import route_attention
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


Maker = Callable[["PretrainedConfig"], "PreTrainedModel"]
"""What makes a model of its config, on the device of the context."""


def build(config: Config, model: PretrainedConfig, make: Maker = models.causal_model) -> PreTrainedModel:
    """Return the model of a config, on the device of the context.

    Args:
        config: the config of the run.
        model: the config of its model.
        make: a function that makes the model, before anything is added.

    Raises:
        ConfigError: adapters are asked for beside layers that can have none, or of modules that are not there; or noise
            on embeddings, or routers in float32, that it lacks.
    """
    built = make(model)
    if config.experts.router_dtype == "float32":
        in_float32(need_routers(built, "experts.router_dtype"))
    if config.model.neftune_alpha:
        EmbeddingNoise(config.model.neftune_alpha).attach(built, embedding_of(built, config.model.name))
    if config.data.boundaries == "keep":
        route_attention(built, document_rule)
    if config.lora.rank:
        add_adapters(
            built, config.lora, targets(built, config), learned_modules(built, config.lora.modules_to_save)
        )
    return built


def call_options(model: PretrainedConfig) -> dict[str, bool]:
    """Return what a model of this config is called with beside a batch: losses of routers are not its own to add."""
    text = model.get_text_config()
    return {"output_router_logits": False} if getattr(text, "output_router_logits", False) else {}


def on_meta(config: Config, model: PretrainedConfig, make: Maker = models.causal_model) -> PreTrainedModel:
    """Return the model of a config without memory."""
    with torch.device("meta"):
        return build(config, model, make)


def targets(model: nn.Module, config: Config) -> tuple[str, ...]:
    """Return the layers with adapters: those that are asked for, or the linear layers of the blocks.

    Args:
        model: the model without adapters.
        config: the config, whose `lora.targets` are names or ends of names.

    Raises:
        ConfigError: there are none, or one of them is to be trained whole.
    """
    learned = learned_modules(model, config.lora.modules_to_save)
    named = dict(model.named_modules())
    if config.lora.targets:
        for target in config.lora.targets:
            if twice := [name for name in matching(named, target) if inside(name, learned)]:
                raise ConfigError(
                    "a layer has an adapter and is trained whole",
                    got=f"{twice[0]}, of lora.targets and of lora.modules_to_save",
                    fix="leave it out of one of them",
                )
        return config.lora.targets
    inner = {id(module) for block in blocks_of(model) for module in block.modules()}
    names = [
        name
        for name, module in named.items()
        if id(module) in inner and is_linear(module) and not inside(name, learned)
    ]
    if not names:
        raise ConfigError(
            "the blocks of this model have no linear layers that could have an adapter",
            got=type(model).__name__,
            fix="name layers as lora.targets, or train all weights (lora.rank = 0)",
        )
    return tuple(names)


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return what fills a module of a model: as transformers does, adapters as peft does."""
    named = {module: name for name, module in model.named_modules()}
    plain = models.initializer(model)

    def fill(module: nn.Module) -> None:
        if is_adapter(f"{named[module]}."):
            initialize(module, named[module])
        else:
            plain(module)

    return fill
