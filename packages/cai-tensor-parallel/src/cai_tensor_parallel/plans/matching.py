"""The modules and parameters of a model that the globs of a plan name."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from cai_mesh.errors import PlanError, did_you_mean
from cai_tensor_parallel.plans.plan import HOLDERS, OF_PARAMETERS, Plan, Role


def present(plan: Plan, model: nn.Module) -> Plan:
    """A plan without the globs that match nothing in a model."""
    names = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    roles = {
        glob: role
        for glob, role in plan.roles.items()
        if fnmatch.filter(names, glob) or named_parameters_of(glob, parameters)
    }
    return replace(plan, roles=roles)


def named_parameters_of(glob: str, parameters: Iterable[str]) -> list[str]:
    """Parameters that a glob names: those it matches whose own name is its last word."""
    last = glob.rpartition(".")[2]
    return [name for name in fnmatch.filter(parameters, glob) if name.rpartition(".")[2] == last]


def check_parameter(name: str, role: Role, owner: Role | None) -> None:
    """Raise `PlanError` where a parameter cannot have a role, or its module has none that is for it."""
    if role.kind not in OF_PARAMETERS:
        raise PlanError(
            f"the plan gives the parameter {name} a role of modules",
            got=role.kind,
            expected=f"{', '.join(OF_PARAMETERS)} or replicated",
            fix=f"name its module, {name.rpartition('.')[0]}",
        )
    if owner is None or owner.kind not in HOLDERS:
        raise PlanError(
            f"the plan cuts the parameter {name}, and its module has no role that says what it makes of a part",
            got="no role" if owner is None else owner.kind,
            expected=" or ".join(HOLDERS),
            cause="whether its results are parts of a sum or of the features is not known",
            fix=f"give {name.rpartition('.')[0]} one of these roles, or, if it is a layer, the one of the layer",
        )


def match(plan: Plan, model: nn.Module, *, strict: bool = True) -> dict[str, Role]:
    """The role of every module and parameter the plan names, by name; the last matching glob wins.

    Raises `PlanError` for a glob that matches nothing, if `strict`, and for a parameter that cannot have its role.
    Embedding and head may be absent: they live on one pipeline stage.
    """
    names = [name for name, _ in model.named_modules() if name]
    parameters = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    by_name: dict[str, Role] = {}
    for glob, role in plan.parsed().items():
        hits = fnmatch.filter(names, glob)
        named = named_parameters_of(glob, parameters)
        if strict and not hits and not named and not role.kind.startswith("vocab"):
            raise PlanError(
                f"the plan's {glob!r} matches no module or parameter",
                fix=did_you_mean(glob, [*names, *parameters][:400]),
            )
        by_name.update(dict.fromkeys(hits, role))
        by_name.update({name: replace(role, parameter=name.rpartition(".")[2]) for name in named})
    for name, role in by_name.items():
        if role.parameter and not role.kind.startswith("replicate"):
            check_parameter(name, role, by_name.get(name.rpartition(".")[0]))
    return by_name
