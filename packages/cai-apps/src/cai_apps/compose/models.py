"""Where a model's shape comes from: a preset shipped here, a local HF directory, or a hub id.

A preset is an HF config.json under `presets/`. Only shapes are read; weights are made by the run.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from cai_mesh.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


def presets() -> list[str]:
    """Names of the model shapes that ship with cai."""
    return sorted(
        file.name.removesuffix(".json") for file in _directory().iterdir() if file.name.endswith(".json")
    )


def load_model_config(name: str) -> PretrainedConfig:
    """The HF config of a preset, a directory with a config.json, or a hub id.

    Raises:
        ConfigError: none of the three exists under this name.
    """
    from transformers import AutoConfig

    if name in presets():
        table = json.loads((_directory() / f"{name}.json").read_text(encoding="utf-8"))
        return AutoConfig.for_model(table.pop("model_type"), **table)
    directory = Path(name).expanduser()
    if directory.is_dir() and not (directory / "config.json").is_file():
        raise ConfigError(
            f"model.name is a directory without a config.json: {name}", expected="an HF model directory"
        )
    try:
        return AutoConfig.from_pretrained(directory if directory.is_dir() else name, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model {name!r}",
            expected="a preset, a local HF directory, or a hub id that can be downloaded",
            cause=str(error).splitlines()[0],
            fix=did_you_mean(name, presets()),
        ) from None


def _directory():
    return resources.files("cai_apps") / "presets"


def pretrained_directory(name: str) -> Path:
    """The directory with the safetensors of a local HF directory, or of a hub id (downloaded if need be).

    Raises:
        ConfigError: a preset, which has no weights, or nothing with safetensors under this name.
    """
    if name in presets():
        raise ConfigError(
            f'model.weights = "pretrained", but the preset {name!r} is only a shape',
            expected="an HF directory or a hub id",
            fix='set model.name to one, or model.weights to "random"',
        )
    directory = Path(name).expanduser()
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(f"the weights of {name!r} cannot be downloaded", cause=cause) from None
    if not any(directory.glob("*.safetensors")):
        raise ConfigError(f"{directory} holds no safetensors", expected="the weights of an HF model")
    return directory


def model_config_for(name: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The config of a model that will read and write the tokens of `tokenizer`."""
    config = load_model_config(name)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return config


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """What initializes a module of a transformers model: `_init_weights` of the model, or of the part that it is in."""
    found: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: nn.Module, above: Callable[[nn.Module], None] | None) -> None:
        own = getattr(module, "_init_weights", None) or above
        found.setdefault(module, own)  # type: ignore[arg-type]
        for child in module.children():
            visit(child, own)

    visit(model, None)
    return lambda module: found[module](module)


def causal_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of a config, on the device of the context."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    if any(param.is_meta for param in model.parameters()):
        for module in model.modules():
            for name, param in module._parameters.items():
                if param is not None and not param.is_meta:  # made by a function that knows of no devices
                    module._parameters[name] = torch.nn.Parameter(
                        param.detach().to("meta"), param.requires_grad
                    )
    return model


def meta_model(config: PretrainedConfig) -> PreTrainedModel:
    """The whole causal language model on the meta device: names and shapes, no memory."""
    import torch

    with torch.device("meta"):
        return causal_model(config)
