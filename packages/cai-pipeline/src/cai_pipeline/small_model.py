"""A small instance of a model's class and config, on which `split` is verified first, and where its layers are."""

from __future__ import annotations

from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, shrunk


def small_model(model: nn.Module) -> SmallModel:
    """A small version of a transformers causal LM, with as many layers. Raises PlanError when none can be built."""
    config = getattr(model, "config", None)
    return shrunk(model, find_layers(model) if hasattr(config, "get_text_config") else "")


def find_layers(model: nn.Module) -> str:
    """The name of the model's list of decoder layers: the largest `ModuleList` of `num_hidden_layers` entries.

    Raises PlanError when there is none, and for an encoder-decoder, which has two.
    """
    config: Any = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise PlanError(
            f"cannot split {type(model).__name__}", got="an encoder-decoder", expected="a causal LM"
        )
    wanted = getattr(config.get_text_config(), "num_hidden_layers", None)
    found = {
        name: sum(parameter.numel() for parameter in module.parameters())
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == wanted
    }
    outer = {name: size for name, size in found.items() if not any(name.startswith(o + ".") for o in found)}
    if not outer:
        raise PlanError(
            f"cannot find the decoder layers of {type(model).__name__}",
            expected=f"a ModuleList of {wanted} layers, as config.num_hidden_layers says",
        )
    return max(outer, key=lambda name: outer[name])
