"""Convert the linear layers of a model to FP8, in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.errors import KernelError
from cai_kernels.fp8_linear.checks import SCALINGS, Scaling
from cai_kernels.fp8_linear.function import Fp8Linear, Fp8Options
from cai_kernels.fp8_linear.products import InputCache
from cai_kernels.linear_layers import check_unchanged, places_of, replace

Skip = Callable[[str, nn.Module], bool]


def convert_to_fp8(
    model: nn.Module,
    *,
    scaling: Scaling = "tensor",
    fast_accumulate: bool = True,
    backend: Backend = "auto",
    cache_weight: bool = True,
    skip: Skip | None = None,
) -> list[str]:
    """Replace the `nn.Linear` layers of a model by `Fp8Linear`, in place.

    A layer is converted if its type is exactly `nn.Linear` and its features are multiples of 16. The output layer
    (`model.get_output_embeddings()`, where a model has that) is not, since losses are sensitive to its precision.
    Parameters stay the same objects under the same names, so optimizers, tied weights and state dicts are not affected;
    a layer that the model uses under several names stays one layer. Call it before other transforms (`swap`, tensor
    parallelism, sharding, compile) and before registering hooks. The model may be on the meta device.

    Args:
        model: any module that holds linear layers.
        scaling, fast_accumulate, backend: as in `fp8_linear`.
        cache_weight: keep the cast of every weight between uses, 2 bytes a parameter.
        skip: `skip(name, layer)` is called for every name of a layer that would be converted; True leaves it out.

    Returns the names of the converted layers, in the order of `model.named_modules()`. Raises `KernelError`, with the
    model unchanged, if no layer is to be converted, or if one was changed by another transform.
    """
    if scaling not in SCALINGS:
        raise KernelError("unknown scaling", got=repr(scaling), expected=" or ".join(map(repr, SCALINGS)))
    if backend not in get_args(Backend):
        raise KernelError(
            "unknown backend", got=repr(backend), expected=" or ".join(map(repr, get_args(Backend)))
        )
    if type(model) is nn.Linear:
        raise KernelError("a single layer cannot be replaced in place", fix="use Fp8Linear.from_linear")
    names = _convertible(model, skip)
    if not names:
        raise KernelError(
            f"{type(model).__name__} has no linear layer to convert",
            expected="an nn.Linear with features that are multiples of 16, besides the output layer",
        )
    for layer, name in names.items():
        check_unchanged(name, layer, "skip")
    options: Fp8Options = {
        "scaling": scaling,
        "fast_accumulate": fast_accumulate,
        "backend": backend,
        "input_cache": InputCache(),  # q, k and v read the same input; gate and up as well
        "cache_weight": cache_weight,
    }
    for layer, places in places_of(model, names).items():
        replace(places, layer, Fp8Linear.from_linear(layer, **options))
    return list(names.values())


def _convertible(model: nn.Module, skip: Skip | None) -> dict[nn.Linear, str]:
    """The layers to convert, with their first name, in the order of the model."""
    find = getattr(model, "get_output_embeddings", None)
    head = find() if callable(find) else None
    output_layer = getattr(head, "base_layer", head)  # where adapters stand beside it
    names: dict[nn.Linear, str] = {}
    skipped = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if type(module) is not nn.Linear or module is output_layer:
            continue
        if module.in_features % 16 or module.out_features % 16:
            continue
        names.setdefault(module, name)
        if skip is not None and skip(name, module):
            skipped.add(module)
    return {layer: name for layer, name in names.items() if layer not in skipped}
