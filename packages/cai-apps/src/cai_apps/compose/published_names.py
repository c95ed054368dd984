"""Names of tensors in published files, as the model's own library reads and others write them.

Libraries rename parts of their models: since transformers 5.6 `CLIPTextModel` has no `text_model`, which stands in
every file of it on the hub. `from_pretrained` renames what it reads, by tables of its own, which are asked here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from cai_apps.compose.conversions import loaded_tensors
from cai_mesh.checkpoint import Assembly

CLIP, FOLDED = "CLIPTextModel", "text_model."
"""A text encoder, and the part of it that files name and the model does not."""


def present_tensors(model: nn.Module, shapes: Mapping[str, Sequence[int]]) -> dict[str, Assembly]:
    """Return what the tensors of a model are made of, by the names that the model has for them.

    Args:
        model: a model of transformers or diffusers; another's names are its own.
        shapes: those of the files' tensors, by the files' names.

    Raises:
        CheckpointError: one of several tensors is missing that make one of the model.
    """
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return loaded_tensors(model, shapes)
    renamed = {name: name for name in shapes}
    if hasattr(model, "_fix_state_dict_keys_on_load"):  # of diffusers
        diffusers_model: Any = model
        diffusers_model._fix_state_dict_keys_on_load(renamed)
    return {present: Assembly.of(name, shapes[name]) for present, name in renamed.items()}


def hub_name(model: nn.Module, name: str) -> str:
    """Return the name that files on the hub, and the tools that read them, have for a parameter of a model."""
    folded = type(model).__name__ == CLIP and not hasattr(model, FOLDED.removesuffix("."))
    return f"{FOLDED}{name}" if folded and not name.startswith(FOLDED) else name
