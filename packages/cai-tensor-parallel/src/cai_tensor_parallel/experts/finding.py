"""Layers of experts in a model, by their structure."""

from __future__ import annotations

import fnmatch
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of

ARGUMENTS = 3
"""A layer of experts is called with tokens, the experts that each visits, and their weights."""


@dataclass(frozen=True)
class ExpertsRole:
    """The parts of a layer of experts that are cut over ranks.

    Args:
        parameters: local names of the parameters that are stacked by expert, [E, ...] each.
        count: the attribute of the layer that says E.
    """

    parameters: tuple[str, ...]
    count: str = "num_experts"


ExpertsPlan = Mapping[str, ExpertsRole]
"""Layers of experts by name, or by a glob of names."""


def find_experts(model: nn.Module, plan: ExpertsPlan | None = None) -> dict[str, ExpertsRole]:
    """Find the layers of experts of a model.

    A layer is one of experts if its forward takes three arguments, (tokens [T, D], ids [T, K], weights [T, K]), an
    attribute whose name ends in `experts` counts them, and each of its 3-dimensional parameters has one row an expert.
    So are those of transformers 5 built: Mixtral's, Qwen's, DeepSeek's and some sixty others.

    Args:
        model: a model, on the meta device too.
        plan: the layers, where structure does not tell. None: found as above.

    Returns the roles by name of the layer. Raises `PlanError` where there is none, for a glob that matches nothing, and
    for a parameter of the plan that is not stacked by expert.
    """
    roles = experts_here(model, plan)
    if not roles or not all(fnmatch.filter(roles, glob) for glob in plan or ()):
        raise _nothing(model, plan)
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
    return list(dict.fromkeys(name.rpartition(".")[0] for name in spread_parameters(model)))


def spread_parameters(model: nn.Module) -> list[str]:
    """Return the names of the parameters in them that are cut by expert."""
    return [name for name, param in model.named_parameters() if "ep" in layout_of(param).sharded_axes]


def experts_of(module: nn.Module, role: ExpertsRole) -> int:
    """Return the number of experts whose parameters a layer holds."""
    return len(module.get_parameter(role.parameters[0]))


def _role(module: nn.Module) -> ExpertsRole | None:
    params = {name: param for name, param in module._parameters.items() if param is not None}
    counts = {len(param) for param in params.values() if param.dim() == 3}
    if len(counts) != 1 or _argument_count(module) != ARGUMENTS:
        return None
    (experts,) = counts
    counters = [name for name, value in vars(module).items() if name.endswith("experts") and value == experts]
    stacked = tuple(name for name, param in params.items() if param.dim() and len(param) == experts)
    return ExpertsRole(stacked, counters[0]) if counters else None


def _argument_count(module: nn.Module) -> int:
    parameters = inspect.signature(type(module).forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in parameters) - 1


def _check(name: str, module: nn.Module, role: ExpertsRole) -> None:
    experts = getattr(module, role.count, None)
    shapes = {key: tuple(param.shape) for key, param in module._parameters.items() if param is not None}
    missing = [key for key in role.parameters if shapes.get(key, ())[:1] != (experts,)]
    if not role.parameters or missing:
        raise PlanError(
            f"{name} has not the parameters of experts that its role names",
            got=f"{role}; {role.count} = {experts}, shapes {shapes}",
            expected="parameters of the module itself, whose first size is the number of experts",
        )


def _nothing(model: nn.Module, plan: ExpertsPlan | None) -> PlanError:
    stacked = {
        name: [key for key, param in module._parameters.items() if param is not None and param.dim() == 3]
        for name, module in model.named_modules()
    }
    likely = next((name for name, keys in stacked.items() if len(keys) > 1), "model.layers.*.mlp.experts")
    names = ", ".join(f'"{key}"' for key in stacked.get(likely) or ("gate_up_proj", "down_proj"))
    likely = re.sub(r"\.\d+(?=\.|$)", ".*", likely)
    return PlanError(
        f"{type(model).__name__} has no layers of experts" + (" where the plan says" if plan else ""),
        got=", ".join(plan)
        if plan
        else "no module with 3-dimensional parameters, one row an expert, an attribute that counts them, and a forward "
        "of (tokens, ids, weights)",
        fix=f'if it has experts, say where: plan={{"{likely}": ExpertsRole(parameters=({names}), '
        'count="num_experts")}',
    )
