"""Layers of experts in a model, by their structure."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of
from cai_tensor_parallel.experts.refusals import arguments_of, nothing_found

Form = Literal["chosen", "batched"]
"""The arguments of the forward of a layer of experts.

chosen: (tokens [T, D], ids [T, K], weights [T, K]). batched: (rows [E * T, D]) of all experts for all tokens.
"""
ARGUMENTS: dict[int, Form] = {3: "chosen", 1: "batched"}
"""The form of a layer by the number of its arguments."""


@dataclass(frozen=True)
class ExpertsRole:
    """The parts of a layer of experts that are cut over ranks.

    Args:
        parameters: names, in the layer, of the parameters that are stacked by expert, [E, ...] each or [E * F, ...].
        count: the attribute of the layer that says E.
        form: the arguments of its forward, see `Form`.
    """

    parameters: tuple[str, ...]
    count: str = "num_experts"
    form: Form = "chosen"


ExpertsPlan = Mapping[str, ExpertsRole]
"""Layers of experts by name, or by a glob of names."""


def find_experts(model: nn.Module, plan: ExpertsPlan | None = None) -> dict[str, ExpertsRole]:
    """Find the layers of experts of a model.

    A layer is one of experts if an attribute whose name ends in `experts` counts them, each of its 3-dimensional
    parameters has one row an expert, and its forward takes three arguments, (tokens [T, D], ids [T, K],
    weights [T, K]), or one, rows of all experts [E * T, D] that are zero where a token does not visit. So are those of
    transformers 5 built: Mixtral's, Qwen's, DeepSeek's, Llama 4's and some sixty others. Parameters may be a child's,
    of the only one that has some, and matrices whose rows are of one expert and then of the next, as DBRX's.

    Args:
        model: a model, on the meta device too.
        plan: the layers, where structure does not tell. None: found as above.

    Returns the roles by name of the layer. Raises `PlanError` where there is none, for a glob that matches nothing, and
    for a parameter of the plan that is not stacked by expert.
    """
    roles = experts_here(model, plan)
    if not roles or not all(fnmatch.filter(roles, glob) for glob in plan or ()):
        raise nothing_found(model, plan)
    return roles


def experts_here(model: nn.Module, plan: ExpertsPlan | None = None) -> dict[str, ExpertsRole]:
    """Find the same in a part of a model, such as a pipeline's stage, which may have none."""
    if plan is None:
        return {name: role for name, module in model.named_modules() if (role := _role(module)) is not None}
    roles = dict[str, ExpertsRole]()
    for name, module in model.named_modules():
        for glob, role in plan.items():
            if fnmatch.fnmatchcase(name, glob) and next(module.parameters(), None) is not None:
                _check(name, module, role)
                roles[name] = role
    return roles


def spread_experts(model: nn.Module) -> list[str]:
    """Return the names of the layers whose experts are spread over ranks already."""
    return list(dict.fromkeys(_layer_of(model, name) for name in spread_parameters(model)))


def spread_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters in them that are cut by expert."""
    return [name for name, param in model.named_parameters() if "ep" in layout_of(param).sharded_axes]


def experts_of(module: nn.Module, role: ExpertsRole) -> int:
    """Return the number of experts whose parameters a layer holds."""
    return int(getattr(module, role.count))


def owner_of(layer: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that has a parameter of a layer, and its name there."""
    path, _, local = name.rpartition(".")
    return layer.get_submodule(path), local


def _layer_of(model: nn.Module, parameter: str) -> str:
    """Return the name of the nearest module around a parameter that was given a forward of its own."""
    owner = name = parameter.rpartition(".")[0]
    while name and "forward" not in vars(model.get_submodule(name)):
        name = name.rpartition(".")[0]
    return name or owner


def _role(module: nn.Module) -> ExpertsRole | None:
    form = ARGUMENTS.get(len(arguments_of(module)))
    counters = {
        value: name
        for name, value in reversed(vars(module).items())
        if name.endswith("experts") and type(value) is int
    }
    if form is None or not counters:
        return None
    params = {name: param for name, param in module._parameters.items() if param is not None}
    counts = {len(param) for param in params.values() if param.dim() == 3}
    if len(counts) == 1 and (experts := counts.pop()) in counters:
        stacked = [name for name, param in params.items() if param.dim() and len(param) == experts]
        stacked += [
            name
            for name, param in module.named_parameters()
            if "." in name and param.dim() == 3 and len(param) == experts
        ]
        return ExpertsRole(tuple(stacked), counters[experts], form)
    rows = () if params or form != "chosen" else _rows_of_child(module, max(counters))
    return ExpertsRole(rows, counters[max(counters)], form) if rows else None


def _rows_of_child(module: nn.Module, experts: int) -> tuple[str, ...]:
    """Return the matrices, of the one child that has parameters, whose rows are those of as many experts."""
    children = {name for name, _, _ in (key.partition(".") for key, _ in module.named_parameters())}
    params = {
        f"{name}.{key}": param
        for name in children
        for key, param in module.get_submodule(name)._parameters.items()
    }
    matrices = [
        param is not None and param.dim() == 2 and len(param) % experts == 0 for param in params.values()
    ]
    is_stacked = len(children) == 1 and experts > 1 and all(matrices)
    return tuple(params) if is_stacked and len(params) == len(list(module.parameters())) else ()


def _check(name: str, module: nn.Module, role: ExpertsRole) -> None:
    experts = getattr(module, role.count, None)
    shapes = {key: tuple(param.shape) for key, param in module.named_parameters()}
    is_stacked = [
        bool(experts and shapes.get(key) and shapes[key][0] % experts == 0) for key in role.parameters
    ]
    if not role.parameters or not all(is_stacked):
        raise PlanError(
            f"{name} has not the parameters of experts that its role names",
            got=f"{role}; {role.count} = {experts}, shapes {shapes}",
            expected="parameters of the module, whose first size is the number of experts or a multiple of it",
        )
