"""The model of a run: as transformers makes it, with the run's attention, noise and adapters."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.noise import EmbeddingNoise, embedding_of
from cai_apps.compose import models
from cai_apps.compose.documents import document_rule
from cai_apps.compose.lora import add_adapters, learned_modules, targets_of
from cai_apps.compose.routing.finding import need_routers
from cai_apps.compose.routing.precision import in_float32
from cai_mesh.attention import route_attention

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
        learned = learned_modules(built, config.lora.modules_to_save)
        add_adapters(built, config.lora, targets_of(built, config.lora, learned), learned)
    return built


def call_options(model: PretrainedConfig) -> dict[str, bool]:
    """Return what a model of this config is called with beside a batch: losses of routers are not its own to add."""
    text = model.get_text_config()
    return {"output_router_logits": False} if getattr(text, "output_router_logits", False) else {}


def on_meta(config: Config, model: PretrainedConfig, make: Maker = models.causal_model) -> PreTrainedModel:
    """Return the model of a config without memory."""
    with torch.device("meta"):
        return build(config, model, make)
