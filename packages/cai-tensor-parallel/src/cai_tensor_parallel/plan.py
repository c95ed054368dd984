"""Plans: which role every module of a model plays, whatever the mode.

A role says what a module *is* to tensor parallelism; a mode (1d ...) decides the algorithm for each role. Hugging
Face models carry plans in their config and class; models without one have a plan here, written as data.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import nn

from cai_mesh.errors import PlanError, did_you_mean
from cai_tensor_parallel.plans import built_in
from cai_tensor_parallel.vocabulary import vocabulary_roles

ROLES = {
    "colwise": "a linear layer cut by output features; its input is whole on every rank",
    "packed_colwise": "colwise, with blocks packed side by side in the output (2, or N as packed_colwise:N)",
    "colwise_gather_output": "colwise, the output made whole again",
    "rowwise": "a linear layer cut by input features; its input is cut already, its output summed",
    "packed_rowwise": "of a parameter: its last dimension is cut, with blocks packed side by side in it",
    "rowwise_split_input": "rowwise, for an input that is whole on every rank",
    "vocab_embedding": "an embedding cut by rows of the vocabulary",
    "embedding_rowwise": "vocab_embedding, of any table",
    "embedding_colwise": "an embedding cut by features, which are made whole again",
    "vocab_head": "the output layer cut by vocabulary; logits stay cut",
    "classifier": "a linear layer over the residual stream whose output is whole on every rank",
    "norm": "a norm over the features of the residual stream",
    "feature_embedding": "an embedding, such as of positions, that is added to the residual stream",
    "feature_parameters": "parameters whose last dimension is the features of the residual stream",
    "patch_embedding": "a convolution whose output channels are the features of the residual stream",
    "replicated": "whole on every rank, used alike on all",
    "replicate": "replicated",
    "replicated_with_grad_allreduce": "whole on every rank, applied to a part of the activations on each",
    "mla_kv_a_proj": "a whole linear layer whose last features, the rotary ones, each rank uses for its own heads",
    "moe_tp_experts": "a module whose cut parameters make a part of a sum: its inputs are whole, the sum is",
    "all_reduce": "moe_tp_experts, of a module that is always used",
    "moe_identity_expert": "an expert without parameters inside moe_tp_experts, counted once in the sum",
    "local_params": "a module that computes as it is with parameters of its own that are cut",
}
"""Role names a plan may use, with what they mean.

colwise, rowwise and the packed ones are also for parameters by name, in a module with one of the roles of `HOLDERS`:
colwise cuts the last dimension but one (the only one of a vector), rowwise the last.
"""

PACKED = ("packed_colwise", "packed_rowwise")
HOLDERS = ("moe_tp_experts", "all_reduce", "local_params")
"""Roles of modules whose own parameters have roles."""
OF_PARAMETERS = ("colwise", "rowwise", *PACKED)
"""Roles that parameters may have."""

STREAM_ROLES = ("norm", "feature_embedding", "feature_parameters", "patch_embedding")
"""Roles of what modes 2d, 2.5d and 3d cut by the features of the residual stream; mode 1d keeps it whole."""


@dataclass(frozen=True)
class Role:
    """A parsed role: its kind, and for packed layers the number of blocks.

    Args:
        parameter: name in its module of the parameter whose role it is; "": it is the module's.
        heads: (query heads, key/value heads) of the attention whose key or value layer this is.
        width: number of last features that mla_kv_a_proj is about.
        unit: features of a head, where ranks have different numbers of heads; 1: all ranks have as many features.
    """

    kind: str
    blocks: int = 1
    parameter: str = ""
    heads: tuple[int, int] | None = None
    width: int = 0
    unit: int = 1


@dataclass(frozen=True)
class Plan:
    """Globs over names of modules and parameters to roles, and attributes that count features or heads of one rank.

    Args:
        roles: glob over fully-qualified names (`*` also matches dots) to a role name. It names parameters where its
            last word is that of one.
        divided: glob over module names to names of integer attributes that become 1/degree of themselves.
        arguments: glob over module names to tensors for all heads that come as arguments, of which a rank takes its
            part: "alibi:0:num_heads" is the argument `alibi`, whose dim 0 counts heads (or anything times heads, heads
            inside), as many as the attribute `num_heads` says before it is divided.
    """

    roles: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parsed(self) -> dict[str, Role]:
        """The roles by glob. Raises `PlanError` for a role that is unknown or not supported."""
        return {glob: parse_role(glob, text) for glob, text in self.roles.items()}


def parse_role(glob: str, text: str) -> Role:
    """Read a role name. Raises `PlanError` naming the glob when there is no such role."""
    kind, _, count = text.partition(":")
    packed = kind in PACKED
    if kind not in ROLES or (count and (not packed or not count.isdigit() or int(count) < 1)):
        raise PlanError(f"the plan gives {glob!r} an unknown role", got=text, fix=did_you_mean(kind, ROLES))
    return Role(kind, int(count) if count else 2 if packed else 1)


def plan_for(model: nn.Module, ranks: int = 1) -> Plan:
    """The plan of a Hugging Face model: its config's `base_model_tp_plan`, the one in `PLANS` for its type, or one
    found from its structure and proved on a small model of its class and config. A denoiser of diffusers, or a model
    with one inside, has that of its parts, see `parts`.

    Input embedding and output head, and what is tied to them, are cut by vocabulary, where the plan has no other role
    for them and the embedding computes nothing more than a lookup; in a plan from structure where that is proved, too.
    Globs of a carried or built-in plan that are for parts this model does not have are left out. A carried plan with
    no `*` says nothing of the layers (many name the embedding alone) and does not count.

    Args:
        ranks: that share features; parts of a denoiser that cannot be cut over so many stay whole.

    Raises `PlanError` for a model with no plan, with a template to fill in.
    """
    config = getattr(model, "config", None)
    parts = None if hasattr(config, "to_json_string") else plan_of_parts(model, ranks)
    if parts is not None:
        return parts
    prefix = getattr(model, "base_model_prefix", "")
    prefix = prefix + "." if prefix and hasattr(model, prefix) else ""
    carried = getattr(config, "base_model_tp_plan", None) or {}
    if any("*" in glob for glob in carried):
        base = Plan(dict(carried))
    else:
        base = Plan(*(built_in(config) or ({},)))
    prefix = _place(base, model, prefix)
    names = (
        {prefix + glob: value for glob, value in each.items()} for each in (base.divided, base.arguments)
    )
    plan = present(Plan({prefix + glob: role for glob, role in base.roles.items()}, *names), model)
    if not plan.roles:
        return _found(model)
    return replace(plan, roles={**plan.roles, **_vocabulary(model, match(plan, model))})


def _place(plan: Plan, model: nn.Module, prefix: str) -> str:
    """Where a carried plan applies: `prefix`, or, if it names nothing there, the module in which it names most.

    A class that is a part of another model may carry that model's prefix.
    """

    def named(place: str) -> int:
        return len(present(Plan({place + glob: role for glob, role in plan.roles.items()}), model).roles)

    if named(prefix):
        return prefix
    inner = {name for name, _ in model.named_modules() if name and name.count(".") < 2}
    best = max(("", *(f"{name}." for name in sorted(inner))), key=named)
    return best if named(best) else prefix


def _vocabulary(model: nn.Module, given: Mapping[str, Role]) -> dict[str, str]:
    """Of embedding and head, where the plan has `given` them none. What shares a table that stays whole stays whole."""
    roles = vocabulary_roles(model)
    found = {name: model.get_submodule(name) for name in roles}
    whole = [
        module.weight
        for name, module in found.items()
        if (name in given and given[name].kind.startswith("replicate"))
        or (isinstance(module, nn.Embedding) and not is_lookup(module))
    ]
    return {
        name: role
        for name, role in roles.items()
        if name not in given and not any(found[name].weight is weight for weight in whole)
    }


def plan_of_parts(model: nn.Module, ranks: int) -> Plan | None:
    """The plan of a model with parts of diffusers over so many ranks; None for other models."""
    from cai_tensor_parallel.parts import survey  # which plans the models of transformers inside

    found = survey(model, ranks)
    return found.plan if found.plan.roles or found.whole else None


def _found(model: nn.Module) -> Plan:
    from cai_tensor_parallel.structure import plan_from_structure  # which cuts small models by plans

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


def is_lookup(embedding: nn.Module) -> bool:
    """Whether an embedding is a lookup, alone or times its `embed_scale`."""
    return type(embedding).forward is nn.Embedding.forward or hasattr(embedding, "embed_scale")


def _template(model: nn.Module) -> str:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][:4]
    globs = ", ".join(f'"{name}": "colwise or rowwise"' for name in linear) or '"layers.*.up": "colwise"'
    return f"pass plan=Plan(roles={{{globs}, ...}}); roles are {', '.join(ROLES)}"


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
    found: dict[str, Role] = {}
    for glob, role in plan.parsed().items():
        hits = fnmatch.filter(names, glob)
        own = named_parameters_of(glob, parameters)
        if strict and not hits and not own and not role.kind.startswith("vocab"):
            raise PlanError(
                f"the plan's {glob!r} matches no module or parameter",
                fix=did_you_mean(glob, [*names, *parameters][:400]),
            )
        found.update(dict.fromkeys(hits, role))
        found.update({name: replace(role, parameter=name.rpartition(".")[2]) for name in own})
    for name, role in found.items():
        if role.parameter and not role.kind.startswith("replicate"):
            check_parameter(name, role, found.get(name.rpartition(".")[0]))
    return found
