"""A small instance of a model's class and config, on which `split` is verified first, and where its layers are."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import MAKERS, SmallModel, parts_of, shrunk
from cai_pipeline.stages.stage import SHIFT


def small_model(model: nn.Module) -> SmallModel:
    """A small version of a model of transformers, with as many layers. Raises PlanError when none can be built.

    It is given labels where those are tokens, and stages can make a decoder's input ids of them. Other models are
    tried without, and with labels when a call first has them; so is a T5 whose config has no `decoder_start_token_id`.
    """
    config = getattr(model, "config", None)
    lists = find_layers(model) if hasattr(config, "get_text_config") else ""
    labelled = _reads_text(model) and "labels" in signature(type(model).forward).parameters
    if labelled and (isinstance(lists, str) or hasattr(model, SHIFT)):
        with suppress(PlanError):
            return shrunk(model, lists)
    return shrunk(model, lists, labelled=False)


def _reads_text(model: nn.Module) -> bool:
    return getattr(model, "main_input_name", "input_ids") not in MAKERS


def find_layers(model: nn.Module) -> str | tuple[str, str]:
    """The name of the model's list of layers: the largest `ModuleList` of `num_hidden_layers` entries.

    Of an encoder-decoder the names of two: the largest lists of its encoder and of its decoder.

    Raises PlanError when there is none.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        return _layers_in(model, model.get_encoder()), _layers_in(model, model.get_decoder())  # type: ignore[operator]
    configs = [config.get_text_config()] if _reads_text(model) else parts_of(config)
    depths = [getattr(part_config, "num_hidden_layers", None) for part_config in configs]
    list_sizes = _outermost(model, lambda layers: len(layers) in depths)
    if not list_sizes:
        raise PlanError(
            f"cannot find the layers of {type(model).__name__}",
            expected=f"a ModuleList of {' or '.join(map(str, depths))} layers, as config.num_hidden_layers says",
        )
    return max(list_sizes, key=lambda name: list_sizes[name])


def _layers_in(model: nn.Module, part: nn.Module | None) -> str:
    """The name of the largest list of layers in a part of the model."""
    name = next((name for name, module in model.named_modules() if module is part and name), None)
    list_sizes = _outermost(part, len) if part is not None and name else {}
    if not list_sizes:
        raise PlanError(
            f"cannot find the layers of {type(model).__name__}, an encoder-decoder",
            got=f"no ModuleList in {name or 'its encoder or decoder'}",
            expected="an encoder and a decoder with a list of layers each",
        )
    return f"{name}.{max(list_sizes, key=lambda inner: list_sizes[inner])}"


def _outermost(model: nn.Module, fits: Callable[[nn.ModuleList], object]) -> dict[str, int]:
    """The lists that fit and are in no other such, with the number of their parameters."""
    list_sizes = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and fits(module)
    }
    return {
        name: size
        for name, size in list_sizes.items()
        if not any(name.startswith(o + ".") for o in list_sizes)
    }
