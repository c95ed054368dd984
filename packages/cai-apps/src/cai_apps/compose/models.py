"""Where a model's shape comes from: a preset shipped here, a local HF directory, or a hub id.

A preset is an HF config.json under `presets/`: a shape, whose weights are made by the run. A base has a training beside
it, NAME.toml, which makes its pretrained weights.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cai_apps.compose.causality import check_reads_forwards
from cai_mesh.errors import ConfigError, did_you_mean
from cai_mesh.files import check_weights, weight_files

if TYPE_CHECKING:
    from torch import nn
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast


PATH = re.compile(r"[./~]|.*/.*/|.*\.(json|safetensors|gguf|bin)$")
"""Beginning, or form, of a name that is a path and no hub id."""


def presets() -> list[str]:
    """Names of the model shapes that ship with cai."""
    return sorted(
        file.name.removesuffix(".json") for file in _directory().iterdir() if file.name.endswith(".json")
    )


def base_training(name: str) -> Path | None:
    """Return the config of the training that makes the weights of a preset; None: it has none, or is no preset."""
    file = Path(str(_directory() / f"{name}.toml"))
    return file if name in presets() and file.is_file() else None


def read_model_config(name: str) -> dict[str, Any]:
    """The table of a preset, of the config.json of a directory, or of that of a hub id. Needs no transformers.

    Raises:
        ConfigError: none of the three exists under this name, or what there is says no kind of model.
    """
    if name in presets():
        return json.loads((_directory() / f"{name}.json").read_text(encoding="utf-8"))
    directory = Path(name).expanduser()
    if PATH.match(name) and not directory.is_dir():
        raise ConfigError(
            f"model.name is a path, and there is no directory {name}",
            got="a file" if directory.is_file() else None,
            expected="a model's directory, with config.json, tokenizer and safetensors",
            fix="check the path; relative paths start at the current directory",
        )
    file = directory / "config.json" if directory.is_dir() else _downloaded(name)
    if not file.is_file():
        raise ConfigError(
            f"model.name is a directory without a config.json: {name}", expected="an HF model directory"
        )
    try:
        table = json.loads(file.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON", cause=str(error), fix="copy or download it again") from None
    if not isinstance(table, dict) or not isinstance(table.get("model_type"), str):
        raise ConfigError(
            f"{file} does not say what kind of model it is of",
            got=", ".join(sorted(table)[:8]) if isinstance(table, dict) else type(table).__name__,
            expected='a table with "model_type", as transformers writes it',
        )
    return table


def _downloaded(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"no model {name!r}",
            expected="a preset, a local HF directory, or a hub id that can be downloaded",
            cause=str(error).splitlines()[0],
            fix=did_you_mean(name, presets()),
        ) from None


def load_model_config(name: str) -> PretrainedConfig:
    """The HF config of a preset, a directory with a config.json, or a hub id.

    Raises:
        ConfigError: none of the three exists under this name.
    """
    from transformers import AutoConfig

    table = read_model_config(name)
    if name in presets():
        return AutoConfig.for_model(table.pop("model_type"), **table)
    directory = Path(name).expanduser()
    try:
        return AutoConfig.from_pretrained(directory if directory.is_dir() else name, trust_remote_code=False)
    except Exception as error:  # of every class of config, which checks its values with errors of its own
        raise ConfigError(
            f"transformers cannot read the config of {name!r}",
            got=f"model_type {table['model_type']!r}",
            cause=str(error).splitlines()[0] if str(error) else type(error).__name__,
            expected="a model of transformers whose config.json has sound values",
        ) from None


def _directory():
    return resources.files("cai_apps") / "presets"


def pretrained_directory(name: str) -> Path:
    """The directory with the safetensors of a local HF directory, or of a hub id (downloaded if need be).

    Raises:
        CheckpointError: the files of its weights are not sound.
        ConfigError: a preset, which has no weights, nothing with safetensors under this name, or weights in codes.
    """
    if name in presets():
        bases = [preset for preset in presets() if base_training(preset) is not None]
        raise ConfigError(
            f'model.weights = "pretrained", but the preset {name!r} is only a shape',
            expected=f"an HF directory, a hub id, or a base that is trained here: {', '.join(bases)}",
            fix='set model.name to one, or model.weights to "random"',
        )
    _check_unquantized(name)
    directory = Path(name).expanduser()
    if not directory.is_dir():
        from huggingface_hub import snapshot_download

        try:
            directory = Path(snapshot_download(name, allow_patterns=["*.safetensors", "*.json"]))
        except (OSError, ValueError) as error:
            cause = str(error).splitlines()[0]
            raise ConfigError(f"the weights of {name!r} cannot be downloaded", cause=cause) from None
    check_weights(directory)
    weight_files(directory, error=ConfigError)
    return directory


def _check_unquantized(name: str) -> None:
    """Raise ConfigError for weights that a library has quantized, before they are downloaded."""
    quantization = read_model_config(name).get("quantization_config")
    if quantization:
        method = (
            quantization.get("quant_method", "a library") if isinstance(quantization, dict) else "a library"
        )
        raise ConfigError(
            f"the weights of {name!r} are quantized already, by {method}",
            got="quantization_config in its config.json",
            expected="weights in bfloat16, float16 or float32",
            fix='take the model that these were made of; lora.base = "nf4" or "int8" quantizes it while it is read',
        )


def model_config_for(name: str, tokenizer: PreTrainedTokenizerFast) -> PretrainedConfig:
    """The config of a model that will read and write the tokens of `tokenizer`."""
    config = load_model_config(name)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    return config


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """What initializes a module of a transformers model: `_init_weights` of the model, or of the part that it is in."""
    initializers: dict[nn.Module, Callable[[nn.Module], None]] = {}

    def visit(module: nn.Module, above: Callable[[nn.Module], None] | None) -> None:
        initialize = getattr(module, "_init_weights", None) or above
        initializers.setdefault(module, initialize)  # type: ignore[arg-type]
        for child in module.children():
            visit(child, initialize)

    visit(model, None)
    return lambda module: initializers[module](module)


BOTH_WAYS = ("bert-generation", "cpmant", "xlnet")
"""Kinds of which transformers has causal models whose early logits change with later tokens, as they are configured."""


def check_causal(config: PretrainedConfig, name: str) -> None:
    """Raises ConfigError where transformers has no causal language model for a config, read under `name`."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        MODEL_FOR_MASKED_LM_MAPPING,
    )

    masked = type(config) in MODEL_FOR_MASKED_LM_MAPPING and not config.is_encoder_decoder
    if (masked or config.model_type in BOTH_WAYS) and not (
        getattr(config, "is_decoder", False) or getattr(config, "causal", False)
    ):
        raise ConfigError(
            f"{name} reads text in both directions: each token would be predicted from itself",
            got=f"model_type {config.model_type!r} without is_decoder",
            expected="a causal language model",
            fix=f'set "{"causal" if hasattr(config, "causal") else "is_decoder"}": true in its config.json, if it '
            "is to become one and transformers can make it one",
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ConfigError(
            f"{name} is no causal language model",
            got=f"model_type {config.model_type!r}",
            expected="one that AutoModelForCausalLM of transformers makes",
        )


def check_made(name: str) -> None:
    """Raises ConfigError where transformers cannot make the model that a config describes, or it is not causal.

    The model itself takes no memory.
    """
    if name in presets():
        return
    config = load_model_config(name)
    try:
        model = meta_model(config)
    except Exception as error:  # whatever its code meets in values that do not go together
        raise ConfigError(
            f"transformers cannot make the model of {name!r}",
            got=f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}",
            expected="a config.json whose values go together",
        ) from None
    check_reads_forwards(model, name)


def causal_model(config: PretrainedConfig) -> PreTrainedModel:
    """The causal language model of a config, on the device of the context."""
    from transformers import AutoModelForCausalLM

    return without_values(AutoModelForCausalLM.from_config(config, trust_remote_code=False))


def without_values(model: nn.Module) -> Any:
    """Return a model that is on the meta device in part, with all its parameters there; another as it is."""
    import torch

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
