"""What fills a model from the files of a run's weights: all of it, or the layers that are quantized meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from torch import nn

from cai_apps.applications.language.base import weights_directory
from cai_apps.applications.language.config import Config
from cai_apps.compose.adapter_files import load_adapter
from cai_apps.compose.lora import plain_name
from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.compose.published_names import present_tensors
from cai_apps.compose.quantized_base import QuantizedBase, Read, codes_of
from cai_mesh.checkpoint import load_hf


def reader(name: str, directory: Callable[[], Path]) -> Read:
    """Return what fills parameters of a model from files.

    Args:
        name: the name that the model's config is found by.
        directory: a function that returns the directory of the files.
    """
    tensors = partial(present_tensors, meta_model(load_model_config(name)))

    def read(model: nn.Module, chosen: Callable[[str], bool]) -> None:
        def names(parameter: str) -> str | None:
            return plain_name(parameter) if chosen(parameter) else None

        load_hf(model, directory(), names=names, tensors=tensors)

    return read


def _reader(config: Config) -> Read:
    return reader(config.model.name, partial(weights_directory, config))


def quantized_base(config: Config) -> QuantizedBase | None:
    """Return how the base of a config is quantized; None: it is not."""
    return None if config.lora.base == "compute" else QuantizedBase(config.lora.base, _reader(config))


def pretrained(
    config: Config, absent: Callable[[], frozenset[str]] = frozenset
) -> Callable[[nn.Module], None] | None:
    """Return what fills a model from files, but for the layers that are quantized; None: initial values stay.

    Args:
        config: the config of the run.
        absent: a function that returns names of parameters that the files do not have, which stay as they are.
    """
    if config.model.weights != "pretrained":
        return None
    read = _reader(config)

    def load(model: nn.Module) -> None:
        unread = codes_of(model) | absent()
        read(model, lambda name: name not in unread)
        if config.lora.adapter is not None:
            load_adapter(model, config.lora.adapter)

    return load
