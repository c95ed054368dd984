"""Convert linear layers of a model to quantized ones, in place."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from cai_kernels.errors import KernelError
from cai_kernels.linear_layers import check_unchanged, places_of, replace
from cai_kernels.quantized_linear.function import has_values
from cai_kernels.quantized_linear.kinds import QuantizedKind, check_features, check_kind
from cai_kernels.quantized_linear.layer import QuantizedLinear


def convert_to_quantized(
    model: nn.Module, kind: QuantizedKind, *, chosen: Callable[[str, nn.Linear], bool]
) -> list[str]:
    """Replace chosen `nn.Linear` layers of a model by `QuantizedLinear`, in place, under the same names.

    Weights are quantized where they are and one after the other, and each is released before the next. Biases stay the
    same parameters. Call it before other transforms (adapters, `swap`, tensor parallelism, sharding, compile) and
    before registering hooks. The model may be on the meta device.

    Args:
        model: any module that holds linear layers.
        kind: "nf4" or "int8".
        chosen: `chosen(name, layer)` is called for every name of every layer whose type is exactly `nn.Linear`; a
            layer is converted if it is true for all its names.

    Returns the names of the converted layers, in the order of `model.named_modules()`. Raises `KernelError`, with the
    model unchanged, if nothing is chosen, or if a chosen layer trains its weight, shares it with another module, was
    changed by another transform, does not fit the kind or is not finite. A GPU is waited for once before, and once a
    layer.
    """
    check_kind(kind)
    if type(model) is nn.Linear:
        raise KernelError("a single layer cannot be replaced in place", fix="use QuantizedLinear.from_linear")
    names = _chosen(model, chosen)
    if not names:
        raise KernelError(
            f"{type(model).__name__} has no linear layer to quantize",
            expected="an nn.Linear for all of whose names `chosen` is true",
        )
    _check(model, names, kind)
    places = places_of(model, names)
    converted = list(names.values())
    names.clear()  # places alone still have the old layers
    while places:
        layer, layer_places = places.popitem()
        replace(layer_places, layer, QuantizedLinear.from_linear(layer, kind))
    return converted


def _chosen(model: nn.Module, chosen: Callable[[str, nn.Linear], bool]) -> dict[nn.Linear, str]:
    """Return the chosen layers, with their first name, in the order of the model."""
    names: dict[nn.Linear, str] = {}
    refused = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is nn.Linear:
            names.setdefault(module, name)
            if not chosen(name, module):
                refused.add(module)
    return {layer: name for layer, name in names.items() if layer not in refused}


def _check(model: nn.Module, names: dict[nn.Linear, str], kind: QuantizedKind) -> None:
    """Raise `KernelError` for the first layer that cannot be quantized."""
    sharers: dict[nn.Parameter, list[str]] = {}
    for name, module in model.named_modules():
        for _, parameter in module.named_parameters(recurse=False):
            sharers.setdefault(parameter, []).append(name)
    for layer, name in names.items():
        check_unchanged(name, layer, "chosen")
        check_features(layer.in_features, layer.out_features, kind, name)
        if layer.weight.requires_grad:
            raise KernelError(
                f"the weight of {name!r} trains, and codes cannot",
                got="requires_grad",
                fix="freeze it with requires_grad_(False), or leave it out with chosen",
            )
        if len(sharers[layer.weight]) > 1:
            raise KernelError(
                f"the weight of {name!r} is tied",
                got=f"a parameter of {' and '.join(map(repr, sharers[layer.weight]))}",
                fix="leave it out with chosen",
            )
    _check_finite(names)


def _check_finite(names: dict[nn.Linear, str]) -> None:
    """Raise `KernelError` for the first layer with a number that float32 has not; each device is waited for once."""
    largest: dict[torch.device, dict[str, torch.Tensor]] = {}
    for layer, name in names.items():
        weight = layer.weight.detach()
        if has_values(weight):
            norm = torch.linalg.vector_norm(weight, float("inf")).float()
            largest.setdefault(weight.device, {})[name] = norm
    for norms in largest.values():
        for name, finite in zip(norms, torch.stack(list(norms.values())).isfinite().tolist(), strict=True):
            if not finite:
                raise KernelError(
                    f"the weight of {name!r} is not finite",
                    got="NaN or infinity",
                    expected="finite numbers",
                    fix="look for a damaged file, or for training that diverged",
                )
