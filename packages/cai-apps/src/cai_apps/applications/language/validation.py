"""Checks a config of a language model before any rank starts."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from cai_apps.applications.language.base import is_base
from cai_apps.applications.language.config import Config
from cai_apps.applications.language.rules import check_model, check_numbers, check_settings, with_adapter
from cai_apps.compose.models import check_causal, presets, pretrained_directory
from cai_apps.config import validation

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def own_coefficient(model: PretrainedConfig) -> float | None:
    """Return the coefficient of the load-balancing loss that a model's config asks for; None: it asks for none."""
    text = model.get_text_config()
    asks = getattr(text, "output_router_logits", False)
    return getattr(text, "router_aux_loss_coef", None) if asks else None


def resolve(config: Config, model: PretrainedConfig, world_size: int) -> Config:
    """The config with everything worked out for `world_size` ranks.

    Raises:
        MeshError: the degrees do not multiply to `world_size`.
        CheckpointError: the files of pretrained weights are not sound; those of a preset are looked for by a run alone.
        ConfigError: the model is no causal one, it or the batch does not divide as asked, a value is out of range, or
            settings do not go together.
    """
    config = with_adapter(validation.resolve(config, world_size))
    if config.data.tokenizer == "auto" and not is_base(config):
        named = config.model.name if config.model.weights == "pretrained" else "train"
        config = replace(config, data=replace(config.data, tokenizer=named))
    if config.data.boundaries == "auto":
        boundaries = "keep" if config.data.format == "chat" else "ignore"
        config = replace(config, data=replace(config.data, boundaries=boundaries))
    if config.experts.aux_loss is None:
        config = replace(config, experts=replace(config.experts, aux_loss=own_coefficient(model)))
    check_settings(config)
    check_causal(model, config.model.name)
    check_numbers(model.to_dict())
    check_model(config, model)
    if config.model.weights == "pretrained" and config.model.name not in presets():
        pretrained_directory(config.model.name)
    return config
