"""Low-rank adapters beside the experts of a mixture, a pair for each matrix of each expert.

A layer of experts keeps the matrices of all in one parameter, W [E, ...]. Beside it stand A [E, r, in] and
B [E, out, r], and expert e computes W_e x + s B_e A_e x (Hu et al., "LoRA", arXiv:2106.09685). The products are grouped
by expert: no matrix is added to another while the model trains. peft keeps the same numbers in two matrices,
A [E r, in] and B [out, r E], of wrappers around the layer that stand one in another (`target_parameters`).
"""

from __future__ import annotations

import math
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.config.sections import LoRA
from cai_kernels.swap import ExpertForm, expert_form
from cai_mesh.errors import ConfigError, PlanError
from cai_tensor_parallel import ExpertMaths, find_experts

FIRST, SECOND = "lora_A", "lora_B"
FORM, SCALE = "cai_adapted_form", "cai_adapter_scale"
"""Attributes of a layer of experts with adapters: what it computes, and the factor of what adapters add."""


class ExpertMatrices(nn.Module):
    """One of the two matrices of adapters, of all experts of a layer.

    Args:
        shapes: shapes of the stacked matrices, by the names of the parameters that they stand beside.
        like: a parameter of the layer, whose dtype and device they have.
        zeros: whether they begin at zero; else uniform within 1 / sqrt(in), as peft's do.
    """

    def __init__(self, shapes: dict[str, tuple[int, int, int]], like: Tensor, *, zeros: bool) -> None:
        super().__init__()
        self.zeros = zeros
        for name, shape in shapes.items():
            self.register_parameter(
                name, nn.Parameter(torch.empty(shape, dtype=like.dtype, device=like.device))
            )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill them as they begin."""
        with torch.no_grad():
            for param in self.parameters():
                if self.zeros:
                    nn.init.zeros_(param)
                else:
                    nn.init.uniform_(param, -1 / math.sqrt(param.shape[-1]), 1 / math.sqrt(param.shape[-1]))


def expert_parameters(model: nn.Module, targets: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Return the matrices of experts that targets name, by layer, in the order in which the layer has them.

    Args:
        model: a model without adapters.
        targets: names of layers of experts, or ends of them from a dot on, with that of one matrix or without.
    """
    chosen: dict[str, tuple[str, ...]] = {}
    for layer, names in _matrices(model).items():
        matches = tuple(name for name in names if any(_names(layer, name, target) for target in targets))
        if matches:
            chosen[layer] = matches
    return chosen


def without_experts(model: nn.Module, targets: Sequence[str]) -> tuple[str, ...]:
    """Return those of targets that name no matrices of experts."""
    matrices = [(layer, name) for layer, names in _matrices(model).items() for name in names]
    return tuple(
        target for target in targets if not any(_names(layer, name, target) for layer, name in matrices)
    )


def _names(layer: str, matrix: str, target: str) -> bool:
    """Whether a target is the end of the name of a layer of experts, or of one of its matrices from the layer's on.

    "down_proj" alone is a linear layer, as that of a shared expert.
    """
    return _is_end(layer, target) or ("." in target and _is_end(f"{layer}.{matrix}", target))


def _matrices(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """The 3-dimensional parameters of each layer of experts; none of a model without such layers."""
    if not any(param.dim() == 3 for param in model.parameters()):
        return {}
    try:
        layers = find_experts(model)
    except PlanError:  # experts of another form, which a target may leave alone
        return {}
    params = {layer: model.get_submodule(layer)._parameters for layer in layers}
    return {
        layer: tuple(name for name, param in of_layer.items() if param is not None and param.dim() == 3)
        for layer, of_layer in params.items()
    }


def expert_ends(model: nn.Module) -> set[str]:
    """Return ends of the names of matrices of experts, as targets may name them."""
    return {
        f"{layer.rpartition('.')[2]}.{name}" for layer, names in _matrices(model).items() for name in names
    }


def _is_end(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def add_expert_adapters(
    model: nn.Module, lora: LoRA, scale: float, chosen: dict[str, tuple[str, ...]]
) -> None:
    """Put adapters beside matrices of experts, in place; `let_adapters_compute` lets layers use them.

    Args:
        model: a model on any device, meta too, whose experts are together.
        lora: options of the adapters.
        scale: the factor of what they add.
        chosen: the matrices by layer, of `expert_parameters`.

    Raises:
        ConfigError: a layer computes something else than two products with a gate between them, or inputs are dropped.
    """
    if chosen and lora.dropout:
        raise ConfigError(
            "adapters beside experts that drop inputs",
            got=f"lora.dropout = {lora.dropout}, {next(iter(chosen))} among lora.targets",
            cause="peft, which reads their files, knows no dropout beside stacked matrices",
            fix="set lora.dropout to 0, or leave the experts out of lora.targets",
        )
    forms: dict[type, ExpertForm | str | None] = {}
    for name, matrices in chosen.items():
        layer = model.get_submodule(name)
        if type(layer) not in forms:
            forms[type(layer)] = expert_form(layer)
        form = forms[type(layer)]
        if not isinstance(form, ExpertForm):
            raise ConfigError(
                "lora.targets names experts that can have no adapters",
                got=f"{name}, a {type(layer).__name__}: {form or 'it is not called with tokens, ids and weights'}",
                expected="two stacked matrices an expert with a gate between their products",
                fix="leave the experts out of lora.targets",
            )
        shapes = {matrix: _widths(layer, form, matrix) for matrix in matrices}
        like, rank = layer.get_parameter(matrices[0]), lora.rank
        firsts = {matrix: (experts, rank, wide) for matrix, (experts, wide, _) in shapes.items()}
        seconds = {matrix: (experts, out, rank) for matrix, (experts, _, out) in shapes.items()}
        layer.add_module(FIRST, ExpertMatrices(firsts, like, zeros=False))
        layer.add_module(SECOND, ExpertMatrices(seconds, like, zeros=True))
        setattr(layer, FORM, form)
        setattr(layer, SCALE, scale)


def _widths(layer: nn.Module, form: ExpertForm, matrix: str) -> tuple[int, int, int]:
    """(experts, features into a matrix, features out of it)."""
    up, down = form.layout.matrices(layer)
    experts, wide, out = (up if matrix == form.layout.up else down).shape
    turned = form.layout.up_turned if matrix == form.layout.up else form.layout.down_turned
    if getattr(layer, "is_transposed", False) == turned:
        raise ConfigError(
            "lora.targets names experts whose adapters peft would keep the other way round",
            got=f"{type(layer).__name__}.{matrix}",
            fix="leave the experts out of lora.targets",
        )
    return experts, wide, out


def adapted_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the layers of experts with adapters, by name."""
    return {name: module for name, module in model.named_modules() if FORM in vars(module)}


def check_tensor_ranks(model: nn.Module, size: int) -> None:
    """Raise ConfigError where tensor-parallel ranks would share experts with adapters."""
    layer = next(iter(adapted_layers(model)), None)
    if size > 1 and layer is not None:
        raise ConfigError(
            "adapters beside experts, on tensor-parallel ranks",
            got=f"parallel.tensor.size = {size}, adapters beside {layer}",
            expected="data ranks, parallel.experts.size and pipeline stages, of any ZeRO stage",
            fix="set parallel.tensor.size to 1, or leave the experts out of lora.targets",
        )


def compute_adapted(
    layer: nn.Module, tokens: Tensor, ids: Tensor, weights: Tensor, visits: int | None = None
) -> Tensor:
    """Compute a layer of experts with its adapters: a form of `ExpertMaths`, whose arguments it has."""
    form: ExpertForm = vars(layer)[FORM]
    firsts, seconds = layer._modules[FIRST]._parameters, layer._modules[SECOND]._parameters  # type: ignore[union-attr]
    scale = 0.0 if vars(layer).get("_disable_adapters") else vars(layer)[SCALE]
    pairs = {}
    for name, first in firsts.items():  # the compiler cannot follow a name that a comprehension binds
        second = seconds[name]
        if scale and first is not None and second is not None:
            pairs[name] = (first.to(tokens.dtype), second.to(tokens.dtype), scale)
    return form.compute(layer, tokens, ids, weights, visits, adapters=pairs)


def with_adapters(maths: ExpertMaths) -> ExpertMaths:
    """Return what computes layers with adapters by them, and others by `maths`."""

    def compute(
        layer: nn.Module, tokens: Tensor, ids: Tensor, weights: Tensor, visits: int | None = None
    ) -> Tensor:
        chosen = compute_adapted if FORM in vars(layer) else maths
        return chosen(layer, tokens, ids, weights, visits)

    return compute


def let_adapters_compute(model: nn.Module) -> None:
    """Let layers of experts compute with their adapters, in place; experts are together."""
    for layer in adapted_layers(model).values():

        def forward(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            tokens, ids, weights = vars(self)[FORM].bound(args, kwargs)
            shape = tokens.shape
            flat = (value.flatten(0, -2) for value in (tokens, ids, weights))
            return compute_adapted(self, *flat).view(shape)

        layer.forward = types.MethodType(forward, layer)  # type: ignore[method-assign]


def expert_product(model: nn.Module, name: str, adapters: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
    """Return the product of both matrices of adapters, in the shape of the parameter that they stand beside.

    Args:
        model: a model with these adapters.
        name: the parameter's name.
        adapters: adapters in full, by name.
        dtype: the dtype of the product.
    """
    layer_name, _, matrix = name.rpartition(".")
    layer = model.get_submodule(layer_name)
    form: ExpertForm = vars(layer)[FORM]
    turned = form.layout.up_turned if matrix == form.layout.up else form.layout.down_turned
    first, second = (adapters[f"{layer_name}.{kind}.{matrix}"].to(dtype) for kind in (FIRST, SECOND))
    outwards = second @ first  # [E, out, in]
    return outwards if turned else outwards.transpose(1, 2)


def is_expert_adapter(name: str) -> bool:
    """Return whether a parameter of that name is of adapters beside experts."""
    return ".default." not in name and (f".{FIRST}." in name or f".{SECOND}." in name)


def parameter_of(name: str) -> str:
    """Return the name of the parameter beside which one of adapters stands."""
    return name.replace(f".{FIRST}.", ".").replace(f".{SECOND}.", ".")


def file_key(model: nn.Module, name: str) -> str:
    """Return what files of peft call a parameter of adapters beside experts: wrappers stand one in another."""
    kind = FIRST if f".{FIRST}." in name else SECOND
    layer, _, matrix = name.rpartition(f".{kind}.")
    matrices = list(model.get_submodule(f"{layer}.{kind}")._parameters)
    outside = len(matrices) - 1 - matrices.index(matrix)
    return f"{layer}{'.base_layer' * outside}.{kind}.weight"


def to_file(name: str, value: Tensor) -> Tensor:
    """Return a stacked matrix as peft's files have it: A [E r, in], B [out, r E]."""
    if f".{FIRST}." in name:
        return value.flatten(0, 1)
    return value.permute(1, 2, 0).flatten(1)


def from_file(name: str, value: Tensor, experts: int) -> Tensor:
    """Return the stacked matrix of one in a file, the inverse of `to_file`."""
    if f".{FIRST}." in name:
        return value.unflatten(0, (experts, -1))
    return value.unflatten(1, (-1, experts)).permute(2, 0, 1)


def file_shape(name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in a file of a stacked matrix of this shape."""
    return tuple(to_file(name, torch.empty(shape, device="meta")).shape)


def ends_of(chosen: dict[str, tuple[str, ...]], targets: Iterable[str]) -> list[str]:
    """Return `target_parameters` of peft for matrices: the ends that targets name, each with its matrix."""
    ends = set[str]()
    for layer, matrices in chosen.items():
        for target in targets:
            if _is_end(layer, target):
                ends.update(f"{target}.{matrix}" for matrix in matrices)
            elif any(_names(layer, matrix, target) for matrix in matrices):
                ends.add(target)
    return sorted(ends)
