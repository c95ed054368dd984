"""Models that are made for boost."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from cai_apps.booster.checkpoints import check_no_pickle
from cai_apps.booster.lazy import filled_from
from cai_apps.compat.colossalai.absent import answer
from cai_mesh.errors import ConfigError
from cai_mesh.files import check_weights

__all__ = ["LazyInitContext"]

__getattr__ = answer(
    "lazy", {"LazyTensor": "LazyInitContext makes plain tensors on the meta device"}, __all__
)

PLACES = ("cache_dir", "revision", "token", "local_files_only", "force_download")
"""Options of `from_pretrained` that say where files are; those of a hub."""
WITHOUT_EFFECT = ("low_cpu_mem_usage", "use_safetensors", "_from_auto", "_commit_hash", "adapter_kwargs")
"""Options that change nothing here: safetensors are read by parts, always."""
MAKING = ("dtype", "torch_dtype", "attn_implementation")
"""Options that a model without weights takes, too."""


class LazyInitContext:
    """A context in which a model is made without memory; boost gives each rank its part of the values.

    `from_pretrained` of transformers remembers where the weights are, and boost reads them.

    Args:
        tensor_cls: unused.
        default_device: unused: boost chooses the device.
    """

    def __init__(self, tensor_cls: Any = None, default_device: Any = None):
        self.default_device = default_device
        self._stack = ExitStack()

    def __enter__(self) -> LazyInitContext:
        from transformers import PreTrainedModel

        self._stack.enter_context(torch.device("meta"))
        self._stack.enter_context(
            patch.object(PreTrainedModel, "from_pretrained", classmethod(_without_values))
        )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    @staticmethod
    def materialize(module: nn.Module, verbose: bool = False) -> nn.Module:
        """Return a module as it is: boost gives it its values."""
        return module


def _without_values(kind: Any, name: str | Path, *args: Any, config: Any = None, **options: Any) -> Any:
    """Return a model of a directory, or of a hub's id, on the meta device; boost reads its weights.

    Raises:
        ConfigError: options that only a model with weights takes.
        CheckpointError: the weights are pickles, or damaged.
    """
    directory = _directory(name, {key: options.pop(key, None) for key in PLACES})
    options_of_model = {key: options.pop(key) for key in MAKING if key in options}
    for key in WITHOUT_EFFECT:
        options.pop(key, None)
    if config is None:
        config, options = kind.config_class.from_pretrained(directory, return_unused_kwargs=True, **options)
    options.pop("trust_remote_code", None)
    if args or options:
        raise ConfigError(
            "from_pretrained under LazyInitContext does not take all of its options",
            got=", ".join(options) or f"{len(args)} arguments without a name",
            expected=f"options of the config, or {', '.join((*PLACES, *MAKING))}",
            fix="make this model outside the context: boost divides it, too",
        )
    check_no_pickle(directory)
    check_weights(directory)
    model = filled_from(directory, kind._from_config(config, **options_of_model))
    if (directory / "generation_config.json").exists() and model.can_generate():
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(directory)
    return model


def _directory(name: str | Path, places: dict[str, Any]) -> Path:
    """Return the directory of a model; one of a hub is loaded from there."""
    if Path(name).is_dir():
        return Path(name)
    from huggingface_hub import snapshot_download

    options = {key: value for key, value in places.items() if value is not None}
    return Path(snapshot_download(str(name), allow_patterns=["*.safetensors", "*.json"], **options))
