"""Names of tensors in published files, as the model's own library reads and others write them.

Libraries rename parts of their models: since transformers 5.6 `CLIPTextModel` has no `text_model`, which stands in
every file of it on the hub. `from_pretrained` renames what it reads, by tables of its own, which are asked here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

CLIP, FOLDED = "CLIPTextModel", "text_model."
"""A text encoder, and the part of it that files name and the model does not."""


def present_names(model: nn.Module, names: Iterable[str]) -> Mapping[str, str]:
    """Return the files' names of tensors by the names that the model has for them.

    Args:
        model: a model of transformers or diffusers; another's names are its own.
        names: the files' names.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightRenaming, apply_renamings

        renamings = [step for step in get_model_conversion_mapping(model) if isinstance(step, WeightRenaming)]
        return {apply_renamings(name, renamings): name for name in names}
    renamed = {name: name for name in names}
    if hasattr(model, "_fix_state_dict_keys_on_load"):  # of diffusers
        diffusers_model: Any = model
        diffusers_model._fix_state_dict_keys_on_load(renamed)
    return renamed


def hub_name(model: nn.Module, name: str) -> str:
    """Return the name that files on the hub, and the tools that read them, have for a parameter of a model."""
    folded = type(model).__name__ == CLIP and not hasattr(model, FOLDED.removesuffix("."))
    return f"{FOLDED}{name}" if folded and not name.startswith(FOLDED) else name
