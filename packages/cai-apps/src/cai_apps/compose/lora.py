"""Low-rank adapters beside frozen layers (Hu et al., "LoRA", arXiv:2106.09685), by the peft library.

A layer W becomes W x + alpha / rank B A x, of which only A and B learn. peft calls the layer's own parameters
`LAYER.base_layer.weight`, and the others `LAYER.lora_A.default.weight` and `LAYER.lora_B.default.weight`.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.compose.published_names import hub_name
from cai_apps.config.sections import LoRA
from cai_mesh.comm import all_gather_object
from cai_mesh.errors import ConfigError, did_you_mean
from cai_mesh.layout import BoxedTensor

A, B, BASE = ".lora_A.default.weight", ".lora_B.default.weight", ".base_layer.weight"
FILE = "pytorch_lora_weights.safetensors"
"""What diffusers and peft call the file of a model's adapters."""
METADATA = "lora_adapter_metadata"
"""Key of diffusers for the options of adapters, in the head of that file."""


def need_peft() -> None:
    """Raise ConfigError where the library of the adapters is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters (lora.rank) need peft", fix="pip install 'cai-apps[lora]'")


def add_adapters(model: nn.Module, lora: LoRA, targets: Sequence[str]) -> None:
    """Put adapters beside the layers of `targets`, in place, and freeze everything else.

    Args:
        model: a model on any device, meta too; B starts at zero.
        targets: names of layers, or ends of them from a dot on.

    Raises:
        ConfigError: a target is no layer of the model, or no linear layer or convolution.
    """
    from peft import inject_adapter_in_model

    check_targets(model, targets)
    inject_adapter_in_model(_options(lora, targets), model)


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise the ConfigError of `add_adapters`."""
    named = dict(model.named_modules())
    layers = {name for name, module in named.items() if isinstance(module, nn.Linear | nn.Conv2d)}
    ends = {_end(name) for name in layers}
    for target in targets:
        matches = [name for name in named if name == target or name.endswith(f".{target}")]
        unsupported = [f"{name} is a {type(named[name]).__name__}" for name in matches if name not in layers]
        if unsupported or not matches:
            raise ConfigError(
                "lora.targets names what can have no adapter"
                if unsupported
                else "lora.targets names no layer",
                got=f"{target!r}: {unsupported[0]}" if unsupported else repr(target),
                expected="linear layers or convolutions, by their names or the ends of them",
                fix=did_you_mean(target, sorted(ends)),
            )


def _end(name: str) -> str:
    """Return the last word of a layer's name, with the one before it where that is a number."""
    words = name.split(".")
    return ".".join(words[-2:]) if words[-1].isdigit() else words[-1]


def _options(lora: LoRA, targets: Sequence[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank, lora_alpha=alpha_of(lora), target_modules=list(targets), lora_dropout=lora.dropout
    )


def alpha_of(lora: LoRA) -> int:
    return lora.rank if lora.alpha is None else lora.alpha


def initialize(module: nn.Module, name: str) -> None:
    """Fill a module of an adapter as peft does: A by torch's own rule for layers, B with zeros.

    Args:
        name: the module's name in the model.
    """
    if name.endswith(B.removesuffix(".weight")):
        for param in module.parameters(recurse=False):
            nn.init.zeros_(param)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


def is_adapter(name: str) -> bool:
    """Return whether a layer or a parameter of that name belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


def plain_name(name: str) -> str | None:
    """Return the name that a parameter has in the same model without adapters; None: it is not there."""
    return None if is_adapter(name) else name.replace(".base_layer.", ".")


def merged(model: nn.Module, weights: Mapping[str, BoxedTensor], lora: LoRA) -> dict[str, BoxedTensor]:
    """Return the weights that a model without adapters would have, by the names they bear beside adapters. Collective.

    A layer with adapters gives W + alpha / rank B A, in float32 at least.

    Args:
        weights: the adapters' weights by name; a rank may hold parts of some of them.
    """
    adapters, scale = _whole(weights), alpha_of(lora) / lora.rank
    merged_weights = {
        name: boxed for name, boxed in BoxedTensor.of_model(model).items() if not is_adapter(name)
    }
    for name, boxed in merged_weights.items():
        if not name.endswith(BASE):
            continue
        layer, boxed = name.removesuffix(BASE), boxed.present
        dtype = torch.promote_types(boxed.dtype, torch.float32)
        added = scale * (adapters[layer + B].to(dtype).flatten(1) @ adapters[layer + A].to(dtype).flatten(1))
        added = added.view(boxed.global_shape)
        pieces = tuple((box, value.cpu().to(dtype) + added[box.slices()]) for box, value in boxed.pieces)
        merged_weights[name] = replace(boxed, pieces=pieces, dtype=dtype)
    return merged_weights


def save_adapters(
    model: nn.Module,
    directory: Path,
    weights: Mapping[str, BoxedTensor],
    lora: LoRA,
    targets: Sequence[str],
    parts: Mapping[str, str],
) -> None:
    """Write the adapters into one file, in float32, as `load_lora_weights` of diffusers reads it. Collective.

    Names are those of files on the hub, which other tools know. B has alpha / rank in it, for many tools know no alpha
    beside these names, and take the rank for it.

    Args:
        model: the model with its adapters.
        directory: the directory of the file, made where it is not there.
        weights: the adapters' weights by name; a rank may hold parts of some of them.
        lora: options of the adapters.
        targets: names of layers that have adapters, or ends of them.
        parts: beginning of the names of a part of the model -> the name that diffusers has for the part.
    """
    from safetensors.torch import save_file

    adapters, tensors, metadata = _whole(weights), {}, {}
    scale = alpha_of(lora) / lora.rank
    scaled = replace(lora, alpha=lora.rank)
    options = json.loads(json.dumps(_options(scaled, targets).to_dict(), default=sorted))
    for prefix, part in parts.items():
        part_weights = {name: value for name, value in adapters.items() if name.startswith(prefix)}
        module = model.get_submodule(prefix.removesuffix("."))
        for name, value in part_weights.items():
            key = f"{part}.{hub_name(module, name.removeprefix(prefix))}".replace(".default.", ".")
            tensors[key] = (value * scale if name.endswith(B) else value).float().contiguous()
        if part_weights:
            metadata |= {f"{part}.{key}": value for key, value in options.items()}
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
        save_file(
            tensors, directory / FILE, metadata={"format": "pt", METADATA: json.dumps(metadata, indent=2)}
        )


def save_adapter(
    directory: Path, weights: Mapping[str, BoxedTensor], lora: LoRA, targets: Sequence[str], *, base: str
) -> None:
    """Write the adapters of a language model as `PeftModel.from_pretrained` of peft reads them. Collective.

    Args:
        directory: the directory of the files, made where it is not there.
        weights: the adapters' weights by name; a rank may hold parts of some of them.
        lora: options of the adapters.
        targets: names of layers that have adapters, or ends of them.
        base: the name of the model beside which they stand.
    """
    from safetensors.torch import save_file

    adapters = _whole(weights)
    if dist.get_rank() == 0:
        options = _options(lora, targets)
        options.base_model_name_or_path, options.task_type = base, "CAUSAL_LM"
        options.inference_mode = True
        directory.mkdir(parents=True, exist_ok=True)
        options.save_pretrained(directory)
        tensors = {
            f"base_model.model.{name}".replace(".default.", "."): value.float().contiguous()
            for name, value in adapters.items()
        }
        save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})


def _whole(weights: Mapping[str, BoxedTensor]) -> dict[str, Tensor]:
    """Return the adapters' tensors in full, on every rank; a rank may know only some of their names."""
    world = dist.group.WORLD
    mine = {name: (boxed.global_shape, boxed.dtype) for name, boxed in weights.items() if is_adapter(name)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for shapes_of_rank in all_gather_object(mine, world):
        shapes |= shapes_of_rank
    boxed_weights = {
        name: weights.get(name, BoxedTensor(*shape, ())) for name, shape in sorted(shapes.items())
    }
    return {name: boxed.to_full(world) for name, boxed in boxed_weights.items()}
