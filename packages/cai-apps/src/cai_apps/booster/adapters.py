"""Adapters of a user's model (LoRA): put beside its layers, taken into its optimizer, written as a folder of peft."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cai_apps.booster.checkpoints import without_memory
from cai_apps.booster.model import BoostedModel
from cai_apps.compose.adapter_files import load_adapter, save_adapter
from cai_apps.compose.dora import scale_rows, with_lengths
from cai_apps.compose.lora import is_adapter, need_peft
from cai_apps.config.adapters import read_adapter
from cai_mesh.checkpoint import new_directory
from cai_mesh.errors import ConfigError
from cai_mesh.layout import BoxedTensor

OPTIONS = "cai_lora_options"
"""The attribute of a model with the options of its adapters."""


def add_lora(model: nn.Module, directory: Path | None, options: Any) -> nn.Module:
    """Put adapters beside layers of a model, in place, and freeze everything else; return the model.

    Args:
        model: a whole model of transformers.
        directory: a folder of peft with options and weights; None: new adapters.
        options: `peft.LoraConfig` of new adapters.

    Raises:
        ConfigError: peft is missing, neither a folder nor options are given, or rows of what is not linear are to have
            lengths (DoRA).
    """
    need_peft()
    from peft import LoraConfig

    if directory is None and not isinstance(options, LoraConfig):
        raise ConfigError(
            "adapters need options",
            got=type(options).__name__,
            expected="lora_config=peft.LoraConfig(...), or pretrained_dir=...",
        )
    if directory is not None:
        read_adapter(directory)
        options = LoraConfig.from_pretrained(str(directory))
        options.inference_mode = False
    model.requires_grad_(False)
    _inject(options, model)
    setattr(model, OPTIONS, options)
    if directory is not None:
        load_adapter(model, directory)
    return model


def _inject(options: Any, model: nn.Module) -> None:
    """Put adapters of peft's options into a model, in place; lengths of rows (DoRA) are those of `RowLengths`."""
    from peft import inject_adapter_in_model

    inject_adapter_in_model(replace(options, use_dora=False), model)
    if options.use_dora:
        scale_rows(model)


def adopt_lora(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Let an optimizer that was made before the adapters step them, each in the group of the layer beside it."""
    if not hasattr(model, OPTIONS):
        return
    groups = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    named = dict(model.named_parameters())
    for name, param in named.items():
        if is_adapter(name) and id(param) not in groups:
            base = named.get(f"{name.split('.lora_')[0]}.base_layer.weight")
            group = groups.get(id(base), optimizer.param_groups[0])
            group["params"].append(param)


def save_lora(model: BoostedModel, directory: Path) -> None:
    """Write a model's adapters as a folder that `PeftModel.from_pretrained` of peft reads. Collective.

    Args:
        model: the boosted model.
        directory: new, or empty.

    Raises:
        ConfigError: it has no adapters.
    """
    module = model.module
    options = getattr(module, OPTIONS, None)
    if options is None:
        raise ConfigError(
            "the model has no adapters", fix="booster.enable_lora(model, lora_config=...) before boost"
        )
    adapters = {name: boxed for name, boxed in BoxedTensor.of_model(module).items() if is_adapter(name)}
    weights = with_lengths(module, adapters)
    model_without_memory = _whole(module, options)
    with new_directory(directory) as new:
        save_adapter(new, weights, model_without_memory, options, None, str(options.task_type or "CAUSAL_LM"))


def _whole(module: nn.Module, options: Any) -> nn.Module:
    """Return all of a model with its adapters, without memory; a pipeline's rank has a part of it."""
    empty = without_memory(module)
    if empty is not module:
        empty.requires_grad_(False)
        with torch.device("meta"):
            _inject(options, empty)
    return empty
