"""Frozen weights beside adapters in 4 or 8 bits an element (Dettmers et al., "QLoRA", arXiv:2305.14314).

A layer is quantized when it has its values, block after block while a model is filled, so that no more than one block
is there in full. What is multiplied is the quantized weight, in training as in a merged export.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from cai_apps.compose.blocks import blocks_of
from cai_apps.config.sections import BaseKind
from cai_kernels import QuantizedKind, QuantizedLinear
from cai_mesh.errors import ConfigError
from cai_mesh.layout import BoxedTensor, attach_to, canonical_name, record_of

MULTIPLE = {"nf4": 64, "int8": 1}
"""What divides the inputs of a layer: the width of a block that has one scale."""
Read = Callable[[nn.Module, Callable[[str], bool]], None]
"""(model, whether a parameter of that name is asked for): fills parameters of a model from files."""


@dataclass(frozen=True)
class QuantizedBase:
    """The layers of a model that are quantized as it is filled.

    Args:
        kind: "nf4" or "int8".
        read: fills parameters from files.
    """

    kind: QuantizedKind
    read: Read

    def filler(
        self, model: nn.Module, names: Collection[str] | None = None
    ) -> Callable[[Sequence[nn.Module]], None]:
        """Return what is called with modules that have memory: it reads and quantizes their weights.

        Args:
            model: the model, before it is filled.
            names: names of its layers that are quantized; None: `quantized_layers`.
        """
        layers = quantized_layers(model)
        return _Filler(self, model, {name: layers[name] for name in layers if names is None or name in names})


@dataclass
class _Filler:
    """Quantizes the layers of one model, in place.

    Args:
        base: the kind, and what reads the files.
        model: the model.
        layers: the layers by name, as long as they are not quantized.
    """

    base: QuantizedBase
    model: nn.Module
    layers: dict[str, nn.Linear]
    _homes: dict[nn.Module, list[tuple[nn.Module, str]]] = field(init=False)

    def __post_init__(self) -> None:
        self._homes = {}
        for parent in self.model.modules():
            for name, child in parent._modules.items():
                if child is not None:
                    self._homes.setdefault(child, []).append((parent, name))

    def __call__(self, modules: Sequence[nn.Module]) -> None:
        inside = set(modules)
        chosen = {name: layer for name, layer in self.layers.items() if layer in inside}
        if not chosen:
            return
        names = {
            canonical_name(f"{layer}.{name}", param)
            for layer, module in chosen.items()
            for name, param in module.named_parameters()
        }
        self.base.read(self.model, names.__contains__)
        for name, layer in chosen.items():
            self._replace(layer)
            del self.layers[name]

    def _replace(self, layer: nn.Linear) -> None:
        quantized = QuantizedLinear.from_linear(layer, self.base.kind)
        attach_to(quantized, "weight", name=record_of(layer.weight).name)
        for parent, local in self._homes[layer]:
            setattr(parent, local, quantized)
        layer.weight = None  # type: ignore[assignment]  (what makes initial values knows the layer, and would keep it)


def quantized_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a model's blocks that do not learn, by name: those whose weights are quantized."""
    inner = {module for block in blocks_of(model) for module in block.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module in inner and not module.weight.requires_grad
    }


def check_quantized(model: nn.Module, kind: BaseKind) -> None:
    """Raise ConfigError where the frozen layers of a model, on any device, cannot be quantized.

    Args:
        model: the model with its adapters.
        kind: the value of `lora.base`.
    """
    if kind == "compute":
        return
    layers = quantized_layers(model)
    if not layers:
        raise ConfigError(
            f"lora.base = {kind!r} quantizes frozen linear layers, and the blocks of this model have none",
            got=type(model).__name__,
            fix='set lora.base to "compute"',
        )
    for name, layer in layers.items():
        if layer.in_features % MULTIPLE[kind]:
            raise ConfigError(
                f"lora.base = {kind!r} has a scale for every {MULTIPLE[kind]} inputs of a layer",
                got=f"{name}, with {layer.in_features} inputs",
                expected=f"a multiple of {MULTIPLE[kind]}",
                fix='set lora.base to "int8" or to "compute"',
            )


def quantized_share(model: nn.Module, kind: BaseKind) -> str:
    """Return a line that says how much of what does not learn is quantized: experts that share a tensor are not.

    Args:
        model: the model with its adapters, on any device.
        kind: "nf4" or "int8".
    """
    frozen = sum(param.numel() for param in model.parameters() if not param.requires_grad)
    inside_codes = sum(layer.weight.numel() for layer in quantized_layers(model).values())
    return f"{kind} holds {inside_codes:,} of {frozen:,} frozen weights"


def bytes_saved(model: nn.Module, kind: QuantizedKind, width: int) -> int:
    """Return by how many bytes the frozen layers of a model are smaller when they are quantized.

    The weight that is dequantized for a product is there once more, in full: the largest counts.

    Args:
        model: the model before it is filled.
        kind: "nf4" or "int8".
        width: bytes of an element of `precision.compute`.
    """
    layers = [(layer.out_features, layer.in_features) for layer in quantized_layers(model).values()]
    plain = [rows * columns * width for rows, columns in layers]
    return sum(plain) - sum(quantized_bytes(*shape, kind) for shape in layers) - max(plain, default=0)


def quantized_bytes(rows: int, columns: int, kind: QuantizedKind) -> int:
    """Return the bytes of the codes and scales of a weight [rows, columns]."""
    return (
        rows * columns // 2 + rows * (columns // MULTIPLE[kind]) * 4
        if kind == "nf4"
        else rows * (columns + 4)
    )


def codes_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the codes, scales and biases of a model's quantized layers, which were read with them."""
    return frozenset(
        canonical_name(f"{layer}.{name}", param)
        for layer, module in model.named_modules()
        if isinstance(module, QuantizedLinear)
        for name, param in module.named_parameters()
    )


def scales_of(model: nn.Module) -> frozenset[str]:
    """Return the names of the scales of a model's quantized layers, which no file of plain weights has."""
    layers = (name for name, module in model.named_modules() if isinstance(module, QuantizedLinear))
    return frozenset(f"{name}.scales" for name in layers)


def without_codes(model: nn.Module, weights: Mapping[str, BoxedTensor]) -> dict[str, BoxedTensor]:
    """Return weights by name, with the numbers that codes stand for, which are made as they are asked for.

    Args:
        model: the model that the weights belong to.
        weights: its weights by canonical name.
    """
    plain = dict(weights)
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLinear):
            name = canonical_name(f"{name}.weight", module.weight)
            plain[name] = _dequantized(module)
    return plain


def _dequantized(layer: QuantizedLinear) -> BoxedTensor:
    """Return a layer's weight in float32, in which nothing is rounded; it is not in memory until it is lent."""
    empty = torch.empty(layer.out_features, layer.in_features, dtype=torch.float32, device="meta")

    def lend() -> BoxedTensor:
        return BoxedTensor.from_param(layer.dequantized(torch.float32))

    return replace(BoxedTensor.from_param(empty), lend=lend)
