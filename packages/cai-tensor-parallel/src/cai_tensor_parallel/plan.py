"""Plans: which role every module of a model plays, whatever the mode.

A role says what a module *is* to tensor parallelism; a mode (1d ...) decides the algorithm for each role. Hugging
Face models carry plans in their config and class; models without one have a plan here, written as data.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from cai_mesh.errors import PlanError, did_you_mean

ROLES = {
    "colwise": "a linear layer cut by output features; its input is whole on every rank",
    "packed_colwise": "colwise, with blocks packed side by side in the output (2, or N as packed_colwise:N)",
    "colwise_gather_output": "colwise, the output made whole again",
    "rowwise": "a linear layer cut by input features; its input is cut already, its output summed",
    "rowwise_split_input": "rowwise, for an input that is whole on every rank",
    "vocab_embedding": "an embedding cut by rows of the vocabulary",
    "vocab_head": "the output layer cut by vocabulary; logits stay cut",
    "replicated": "whole on every rank, used alike on all",
    "replicated_with_grad_allreduce": "whole on every rank, applied to a part of the activations on each",
}
"""Role names a plan may use, with what they mean."""

_EXPERT_ROLES = {
    "ep_dispatch_experts",
    "moe_tp_experts",
    "ep_router",
    "local",
    "local_colwise",
    "local_rowwise",
}


@dataclass(frozen=True)
class Role:
    """A parsed role: its kind, and for packed layers the number of blocks."""

    kind: str
    blocks: int = 1


@dataclass(frozen=True)
class Plan:
    """Globs over module names to roles, and attributes that count features or heads of one rank.

    Args:
        roles: glob over fully-qualified module names (`*` also matches dots) to a role name.
        divided: glob over module names to names of integer attributes that become 1/degree of themselves.
    """

    roles: Mapping[str, str]
    divided: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def parsed(self) -> dict[str, Role]:
        """The roles by glob. Raises `PlanError` for a role that is unknown or not supported."""
        return {glob: parse_role(glob, text) for glob, text in self.roles.items()}


def parse_role(glob: str, text: str) -> Role:
    """Read a role name. Raises `PlanError` naming the glob when there is no such role."""
    kind, _, count = text.partition(":")
    if kind in _EXPERT_ROLES:
        raise PlanError(
            f"the plan gives {glob!r} an expert role, and expert parallelism is not part of this release",
            got=text,
            expected=", ".join(ROLES),
            fix="pass a plan that leaves the experts replicated",
        )
    if kind not in ROLES or (count and (kind != "packed_colwise" or not count.isdigit() or int(count) < 1)):
        raise PlanError(f"the plan gives {glob!r} an unknown role", got=text, fix=did_you_mean(kind, ROLES))
    return Role(kind, int(count) if count else 2 if kind == "packed_colwise" else 1)


GPT2 = Plan(
    roles={
        "h.*.attn.c_attn": "packed_colwise:3",
        "h.*.attn.c_proj": "rowwise",
        "h.*.mlp.c_fc": "colwise",
        "h.*.mlp.c_proj": "rowwise",
    },
    divided={"h.*.attn": ("split_size", "num_heads")},
)

BUILT_IN = {"gpt2": GPT2}
"""Plans, relative to the base model, by `config.model_type`, for models that carry none of their own."""


def plan_for(model: nn.Module) -> Plan:
    """The plan of a Hugging Face model: its config's `base_model_tp_plan`, or the built-in one for its type.

    The input embedding and the output head are cut by vocabulary in either case. Raises `PlanError` for a model
    with neither, with a template to fill in.
    """
    config = getattr(model, "config", None)
    prefix = getattr(model, "base_model_prefix", "")
    prefix = prefix + "." if prefix and hasattr(model, prefix) else ""
    carried = getattr(config, "base_model_tp_plan", None)
    if carried:
        base = Plan(dict(carried))
    elif getattr(config, "model_type", None) in BUILT_IN:
        base = BUILT_IN[config.model_type]  # type: ignore[union-attr]
    else:
        raise PlanError(f"there is no tensor-parallel plan for {type(model).__name__}", fix=_template(model))
    roles = {prefix + glob: role for glob, role in base.roles.items()}
    roles.update(_vocabulary_roles(model))
    return Plan(roles, {prefix + glob: names for glob, names in base.divided.items()})


def _vocabulary_roles(model: nn.Module) -> dict[str, str]:
    roles = {}
    for getter, kind, wanted in (
        ("get_input_embeddings", "vocab_embedding", nn.Embedding),
        ("get_output_embeddings", "vocab_head", nn.Linear),
    ):
        module = getattr(model, getter, lambda: None)()
        if isinstance(module, wanted):
            roles[next(name for name, m in model.named_modules() if m is module)] = kind
    return roles


def _template(model: nn.Module) -> str:
    linear = [name for name, m in model.named_modules() if isinstance(m, nn.Linear)][:4]
    globs = ", ".join(f'"{name}": "colwise or rowwise"' for name in linear) or '"layers.*.up": "colwise"'
    return f"pass plan=Plan(roles={{{globs}, ...}}); roles are {', '.join(ROLES)}"


def match(plan: Plan, model: nn.Module, *, strict: bool = True) -> dict[str, Role]:
    """The role of every module the plan names, by module name; the last matching glob wins.

    Raises `PlanError` for a glob that matches nothing, if `strict`. Embedding and head may be absent: they live on one
    pipeline stage.
    """
    names = [name for name, _ in model.named_modules() if name]
    found: dict[str, Role] = {}
    for glob, role in plan.parsed().items():
        hits = fnmatch.filter(names, glob)
        if strict and not hits and not role.kind.startswith("vocab"):
            raise PlanError(f"the plan's {glob!r} matches no module", fix=did_you_mean(glob, names[:200]))
        found.update(dict.fromkeys(hits, role))
    return found
