"""Low-rank adapters beside frozen layers (Hu et al., "LoRA", arXiv:2106.09685), by the peft library.

A layer W becomes W x + s B A x, of which only A and B learn; s is alpha / rank, or with stabilized ranks
(Kalajdzievski, "rsLoRA", arXiv:2312.03732) alpha / sqrt(rank). peft calls the layer's own parameters
`LAYER.base_layer.weight`, and the others `LAYER.lora_A.default.weight` and `LAYER.lora_B.default.weight`. Modules that
are trained whole beside them keep their names: peft trains a copy of each, which would be kept twice.
"""

from __future__ import annotations

import importlib.util
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cai_apps.compose import models
from cai_apps.compose.blocks import blocks_of
from cai_apps.compose.dora import BASE, is_linear, no_rows, scale_merged, scale_rows
from cai_apps.compose.expert_adapters import (
    adapted_layers,
    add_expert_adapters,
    expert_ends,
    expert_parameters,
    expert_product,
    is_expert_adapter,
    parameter_of,
    without_experts,
)
from cai_apps.compose.published_names import hub_name
from cai_apps.compose.quantized_base import without_codes
from cai_apps.config.sections import LoRA
from cai_mesh.adapters import adapters
from cai_mesh.comm import all_gather_object
from cai_mesh.errors import ConfigError, did_you_mean
from cai_mesh.layout import BoxedTensor

if TYPE_CHECKING:
    from peft import LoraConfig

A, B = ".lora_A.default.weight", ".lora_B.default.weight"
FILE = "pytorch_lora_weights.safetensors"
"""What diffusers and peft call the file of a model's adapters."""
METADATA = "lora_adapter_metadata"
"""Key of diffusers for the options of adapters, in the head of that file."""


def need_peft() -> None:
    """Raise ConfigError where the library of the adapters is not installed."""
    if importlib.util.find_spec("peft") is None:
        raise ConfigError("adapters (lora.rank) need peft", fix="pip install 'cai-apps[lora]'")


def add_adapters(model: nn.Module, lora: LoRA, targets: Sequence[str], learned: Sequence[str] = ()) -> None:
    """Put adapters beside the layers of `targets`, in place, and freeze everything else.

    Args:
        model: a model on any device, meta too; B starts at zero.
        lora: options of the adapters.
        targets: names of layers, or of the stacked matrices of experts, or ends of them from a dot on.
        learned: names of modules that are trained whole, of `learned_modules`.

    Raises:
        ConfigError: a target is no layer of the model, or neither a linear layer nor a convolution nor of experts; or
            rows of what is not linear are to have lengths.
    """
    from peft import inject_adapter_in_model

    experts = expert_parameters(model, targets)
    layers = without_experts(model, targets)
    check_targets(model, layers)
    if lora.dora:
        _check_rows(model, layers, experts)
    model.requires_grad_(False)
    if layers:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "fan_in_fan_out is set to")  # it sees which layers have it
            inject_adapter_in_model(peft_options(replace(lora, dora=False), layers), model)
        _check_left_linear(model)
    if lora.dora:
        scale_rows(model)
    add_expert_adapters(model, lora, scale_of(lora), experts)
    for name in learned:
        model.get_submodule(name).requires_grad_(True)


def _check_left_linear(model: nn.Module) -> None:
    """Raise ConfigError where peft has put adapters of linear layers beside experts.

    Since transformers 5 it takes names such as `down_proj`, whole ones too, for matrices of experts
    (`convert_peft_config_for_transformers`), and a shared expert or a dense layer of that name has none.
    """
    wrapped = next(
        (name for name, module in model.named_modules() if hasattr(module, "parameter_name")), None
    )
    if wrapped is not None:
        raise ConfigError(
            "peft would take linear layers of lora.targets for matrices of experts",
            got=f"an adapter beside {wrapped}",
            cause=f"{type(model).__name__} has linear layers and experts with matrices of one name",
            fix="name the layers of attention as lora.targets, and experts for the matrices of experts: "
            "--lora.targets q_proj k_proj v_proj o_proj experts",
        )


def _check_rows(model: nn.Module, targets: Sequence[str], experts: Sequence[str]) -> None:
    """Raise ConfigError where rows of a target would have no length that DoRA learns."""
    named = dict(model.named_modules())
    layers = [name for target in targets for name in matching(named, target)]
    other = next(iter([*experts, *(name for name in layers if not is_linear(named[name]))]), None)
    if other is not None:
        raise no_rows(f"the target {other}")


def check_targets(model: nn.Module, targets: Sequence[str]) -> None:
    """Raise the ConfigError of `add_adapters`."""
    named = dict(model.named_modules())
    layers = {name for name, module in named.items() if is_linear(module) or isinstance(module, nn.Conv2d)}
    ends = {_end(name) for name in layers}
    for target in targets:
        matches = matching(named, target)
        unsupported = [f"{name} is a {type(named[name]).__name__}" for name in matches if name not in layers]
        if unsupported or not matches:
            raise ConfigError(
                "lora.targets names what can have no adapter"
                if unsupported
                else "lora.targets names no layer",
                got=f"{target!r}: {unsupported[0]}" if unsupported else repr(target),
                expected="linear layers or convolutions, or matrices of experts, by their names or the ends of them",
                fix=did_you_mean(target, sorted(ends | expert_ends(model))),
            )


def matching(names: Iterable[str], end: str) -> list[str]:
    """Return those names that are a name, or end with it from a dot on."""
    return [name for name in names if name == end or name.endswith(f".{end}")]


def learned_modules(model: nn.Module, ends: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the modules that are trained whole beside adapters, none of them in another.

    Args:
        model: the model without adapters.
        ends: names of modules, or ends of them from a dot on (`lora.modules_to_save`).

    Raises:
        ConfigError: there is no such module, or it has no weights.
    """
    named = dict(model.named_modules())
    chosen: set[str] = set()
    for end in ends:
        matches = [name for name in matching(named, end) if name]
        empty = [name for name in matches if next(named[name].parameters(), None) is None]
        if empty or not matches:
            raise ConfigError(
                "lora.modules_to_save names what has no weights"
                if empty
                else "lora.modules_to_save names no module",
                got=f"{end!r}: {empty[0]} is a {type(named[empty[0]]).__name__}" if empty else repr(end),
                expected='modules by their names or the ends of them, such as "lm_head"',
                fix=did_you_mean(end, sorted({_end(name) for name in named if name})),
            )
        chosen.update(matches)
    return tuple(sorted(name for name in chosen if not inside(name, chosen - {name})))


def targets_of(model: nn.Module, lora: LoRA, learned: Sequence[str]) -> tuple[str, ...]:
    """Return the layers with adapters: those that are asked for, or the linear layers of the blocks.

    Args:
        model: the model without adapters.
        lora: options of the adapters, whose `targets` are names or ends of names.
        learned: names of modules that are trained whole, of `learned_modules`.

    Raises:
        ConfigError: there are none, or one of them is to be trained whole.
    """
    named = dict(model.named_modules())
    if lora.targets:
        for target in lora.targets:
            if twice := [name for name in matching(named, target) if inside(name, learned)]:
                raise ConfigError(
                    "a layer has an adapter and is trained whole",
                    got=f"{twice[0]}, of lora.targets and of what is trained whole",
                    fix="leave it out of lora.targets, or of lora.modules_to_save",
                )
        return lora.targets
    in_blocks = {id(module) for block in blocks_of(model) for module in block.modules()}
    names = [
        name
        for name, module in named.items()
        if id(module) in in_blocks and is_linear(module) and not inside(name, learned)
    ]
    if not names:
        raise ConfigError(
            "the blocks of this model have no linear layers that could have an adapter",
            got=type(model).__name__,
            fix="name layers as lora.targets, or train all weights (lora.rank = 0)",
        )
    return tuple(names)


def inside(name: str, modules: Iterable[str]) -> bool:
    """Return whether a module or parameter of that name is one of the modules, or in one."""
    return any(name == module or name.startswith(f"{module}.") for module in modules)


def _end(name: str) -> str:
    """Return the last word of a layer's name, with the one before it where that is a number."""
    words = name.split(".")
    return ".".join(words[-2:]) if words[-1].isdigit() else words[-1]


def peft_options(lora: LoRA, targets: Sequence[str], parameters: Sequence[str] = ()) -> LoraConfig:
    """Return the options of adapters as peft has them, of layers and of matrices of experts."""
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=alpha_of(lora),
        use_rslora=lora.rank_stabilized,
        target_modules=list(targets),
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        target_parameters=list(parameters) or None,
    )


def alpha_of(lora: LoRA) -> int:
    return lora.rank if lora.alpha is None else lora.alpha


def scale_of(lora: LoRA) -> float:
    """Return what the product of an adapter's two matrices is multiplied by."""
    return alpha_of(lora) / (math.sqrt(lora.rank) if lora.rank_stabilized else lora.rank)


def initialize(module: nn.Module, name: str) -> None:
    """Fill a module of an adapter as peft does: A by torch's own rule for layers, B and what rows learn with zeros.

    Args:
        name: the module's name in the model.
    """
    if name.endswith(B.removesuffix(".weight")):
        for param in module.parameters(recurse=False):
            nn.init.zeros_(param)
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()  # type: ignore[operator]


def initializer(model: nn.Module) -> Callable[[nn.Module], None]:
    """Return what fills a module of a model: as transformers does, adapters as peft does."""
    named = {module: name for name, module in model.named_modules()}
    plain = models.initializer(model)

    def fill(module: nn.Module) -> None:
        if is_adapter(f"{named[module]}."):
            initialize(module, named[module])
        else:
            plain(module)

    return fill


def is_adapter(name: str) -> bool:
    """Return whether a layer or a parameter of that name belongs to an adapter."""
    return any(part in name for part in (".lora_A.", ".lora_B.", ".lora_magnitude_vector."))


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Inside, layers with adapters compute what they would without them."""
    layers = [module for module in model.modules() if adapters(module)]
    layers += adapted_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True  # `enable_adapters` of peft would freeze them, too
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def plain_name(name: str) -> str | None:
    """Return the name that a parameter has in the same model without adapters; None: it is not there."""
    return None if is_adapter(name) else name.replace(".base_layer.", ".")


def merged(model: nn.Module, weights: Mapping[str, BoxedTensor], lora: LoRA) -> dict[str, BoxedTensor]:
    """Return the weights that a model without adapters would have, by the names they bear beside adapters. Collective.

    A layer with adapters gives its weight with their product added, and with the lengths that its rows have learned, in
    float32 at least.

    Args:
        model: the model with its adapters.
        weights: those that are trained, by name; a rank may hold parts of some of them.
        lora: options of the adapters.
    """
    adapters = dict(full_tensors(weights, is_adapter))
    trained = set().union(*all_gather_object(set(weights), dist.group.WORLD))
    boxes = without_codes(model, BoxedTensor.of_model(model))
    frozen = {name: boxed for name, boxed in boxes.items() if name not in trained}
    joined = {name: boxed for name, boxed in (frozen | dict(weights)).items() if not is_adapter(name)}
    beside_experts = {parameter_of(name): name for name in adapters if is_expert_adapter(name)}
    for name, boxed in joined.items():
        if not (name.endswith(BASE) or name in beside_experts):
            continue
        boxed = boxed.present
        dtype = torch.promote_types(boxed.dtype, torch.float32)
        if name in beside_experts:
            added = expert_product(model, name, adapters, dtype)
        else:
            layer = name.removesuffix(BASE)
            product = adapters[layer + B].to(dtype).flatten(1) @ adapters[layer + A].to(dtype).flatten(1)
            inputs_first = getattr(model.get_submodule(layer), "fan_in_fan_out", False)
            added = (product.T if inputs_first else product).reshape(boxed.global_shape)
        added = scale_of(lora) * added
        pieces = tuple((box, value.cpu().to(dtype) + added[box.slices()]) for box, value in boxed.pieces)
        joined[name] = replace(boxed, pieces=pieces, dtype=dtype, lend=None)
    return scale_merged(model, joined, adapters) if lora.dora else joined


def save_adapters(
    model: nn.Module,
    directory: Path,
    weights: Mapping[str, BoxedTensor],
    lora: LoRA,
    targets: Sequence[str],
    parts: Mapping[str, str],
) -> None:
    """Write the adapters into one file, in float32, as `load_lora_weights` of diffusers reads it. Collective.

    Names are those of files on the hub, which other tools know. B has the scale in it, for many tools know no alpha
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

    adapters, tensors, metadata = dict(full_tensors(weights, is_adapter)), {}, {}
    scale = scale_of(lora)
    scaled = replace(lora, alpha=lora.rank, rank_stabilized=False)
    options = json.loads(json.dumps(peft_options(scaled, targets).to_dict(), default=sorted))
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


def full_tensors(
    weights: Mapping[str, BoxedTensor], chosen: Callable[[str], bool]
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors in full, one after the other, on every rank. Collective.

    Args:
        weights: this rank's parts by name; a rank may know only some of the names.
        chosen: whether a tensor of that name is asked for.
    """
    world = dist.group.WORLD
    mine = {name: (boxed.global_shape, boxed.dtype) for name, boxed in weights.items() if chosen(name)}
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for shapes_of_rank in all_gather_object(mine, world):
        shapes |= shapes_of_rank
    for name, shape in sorted(shapes.items()):
        yield name, weights.get(name, BoxedTensor(*shape, ())).to_full(world)
