"""The plan of a model of transformers: carried by config or class, built in for its type, or found from structure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from cai_mesh.errors import PlanError
from cai_tensor_parallel.cut.vocabulary import vocabulary_roles
from cai_tensor_parallel.finding.structure import plan_from_structure
from cai_tensor_parallel.modes.tables import is_lookup
from cai_tensor_parallel.plans.matching import match, present
from cai_tensor_parallel.plans.model_types import built_in
from cai_tensor_parallel.plans.plan import ROLES, Plan, Role


def plan_of_transformers(model: nn.Module) -> Plan:
    """The plan that `plan_for` describes. Raises `PlanError` for a model without one, with a template to fill in."""
    config = getattr(model, "config", None)
    carried = getattr(config, "base_model_tp_plan", None) or {}
    if any("*" in glob for glob in carried):
        base = Plan(dict(carried))
    else:
        base = Plan(*(built_in(config) or ({},)))
    prefix = getattr(model, "base_model_prefix", "")
    prefix = _place(base, model, prefix + "." if prefix and hasattr(model, prefix) else "")
    names = (
        {prefix + glob: value for glob, value in mapping.items()}
        for mapping in (base.divided, base.arguments)
    )
    plan = present(Plan({prefix + glob: role for glob, role in base.roles.items()}, *names), model)
    if not plan.roles:
        return _from_structure(model)
    return replace(plan, roles={**plan.roles, **_vocabulary(model, match(plan, model))})


def _place(plan: Plan, model: nn.Module, prefix: str) -> str:
    """The place of a carried plan: `prefix`, or, if it names nothing there, the module in which it names most.

    A class that is a part of another model may carry that model's prefix.
    """

    def named(place: str) -> int:
        return len(present(Plan({place + glob: role for glob, role in plan.roles.items()}), model).roles)

    if named(prefix):
        return prefix
    inner = {name for name, _ in model.named_modules() if name and name.count(".") < 2}
    best = max(("", *(f"{name}." for name in sorted(inner))), key=named)
    return best if named(best) else prefix


def _vocabulary(model: nn.Module, planned: Mapping[str, Role]) -> dict[str, str]:
    """Roles of embedding and head that the plan has none for. What shares a table that stays whole stays whole."""
    roles = vocabulary_roles(model)
    modules = {name: model.get_submodule(name) for name in roles}
    whole_tables = [
        module.weight
        for name, module in modules.items()
        if (name in planned and planned[name].kind.startswith("replicate"))
        or (isinstance(module, nn.Embedding) and not is_lookup(module))
    ]
    return {
        name: role
        for name, role in roles.items()
        if name not in planned and not any(modules[name].weight is weight for weight in whole_tables)
    }


def _from_structure(model: nn.Module) -> Plan:
    cause = "no two linear layers of it were found that can be cut together, with the same results"
    try:
        plan = plan_from_structure(model)
    except PlanError as error:
        plan, cause = None, str(error).splitlines()[0]
    if plan is None:
        raise PlanError(
            f"there is no tensor-parallel plan for {type(model).__name__}", cause=cause, fix=_template(model)
        )
    return plan


def _template(model: nn.Module) -> str:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][:4]
    globs = ", ".join(f'"{name}": "colwise or rowwise"' for name in linear) or '"layers.*.up": "colwise"'
    return f"pass plan=Plan(roles={{{globs}, ...}}); roles are {', '.join(ROLES)}"
