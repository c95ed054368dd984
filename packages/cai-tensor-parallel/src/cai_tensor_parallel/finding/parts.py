"""The plan of a model made of known parts: attention and feed-forward layers of diffusers, models of transformers.

Denoisers carry no plan. What is known here is not the model but the parts its blocks are made of, so UNets, DiT and SD3
share two rows. A part that cannot be cut over so many ranks stays whole, and `Survey` says which and why.
"""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_tensor_parallel.cut.heads import query_heads
from cai_tensor_parallel.finding.hugging_face import plan_of_transformers
from cai_tensor_parallel.finding.pairs import pattern
from cai_tensor_parallel.modes.feature_counts import features
from cai_tensor_parallel.modes.head_runs import has_heads_for
from cai_tensor_parallel.plans.diffusers_parts import BLOCKS, HEAD_BY_HEAD, LIBRARY, PARTS, PartLayers
from cai_tensor_parallel.plans.matching import match
from cai_tensor_parallel.plans.plan import Plan


@dataclass
class Survey:
    """The known parts of a model, over so many ranks.

    Args:
        plan: globs where they name nothing else, names otherwise.
        whole: known parts that stay whole, by name: why.
    """

    plan: Plan
    whole: dict[str, str] = field(default_factory=dict)


def survey(model: nn.Module, ranks: int = 1) -> Survey:
    """The plan of a model with parts of diffusers; nothing of one without.

    Args:
        ranks: that share features. A part that cannot be cut over so many stays whole.
    """
    parts = Survey(Plan({}))
    if not any(map(is_part, model.modules())):
        return parts
    roles, divided = dict[tuple[str, str], Any](), dict[tuple[str, str], Any]()
    globs, inside = dict[str, str](), ""
    for name, module in model.named_modules():
        if inside and name.startswith(inside):
            continue
        if hasattr(getattr(module, "config", None), "to_json_string"):
            inside = name + "."
            globs |= _of_transformers(name, module, ranks, parts)
        elif is_part(module):
            part = PARTS[type(module).__name__]
            reason = _obstacle(module, part, ranks)
            if reason:
                parts.whole[name] = reason
                continue
            roles |= {(name, f".{inner}"): role for inner, role in _roles(module, part).items()}
            if part.counts:
                divided[name, ""] = (part.counts,)
    names = [name for name, _ in model.named_modules()]
    parts.plan = Plan(_as_globs(roles, names) | globs, _as_globs(divided, names))
    return parts


def plan_of_parts(model: nn.Module, ranks: int) -> Plan | None:
    """The plan of a model with parts of diffusers over so many ranks; None for other models."""
    parts = survey(model, ranks)
    return parts.plan if parts.plan.roles or parts.whole else None


def is_part(module: nn.Module) -> bool:
    """Whether it is one of `PARTS`."""
    return type(module).__module__.partition(".")[0] == LIBRARY and type(module).__name__ in PARTS


def _inside(module: nn.Module, names: tuple[str, ...]) -> dict[str, nn.Module]:
    """Modules by name, without those that are None or not there."""
    modules = {}
    for name in names:
        try:
            inner = functools.reduce(_child, name.split("."), module)
        except KeyError:
            continue
        modules[name] = inner
    return modules


def _child(module: nn.Module, name: str) -> nn.Module:
    inner = module._modules.get(name)
    if inner is None:
        raise KeyError(name)
    return inner


def _how(module: nn.Module, part: PartLayers) -> str:
    """Name of the class that says how a part's columns are used."""
    return type(functools.reduce(getattr, part.how.split("."), module)).__name__


def _roles(module: nn.Module, part: PartLayers) -> dict[str, str]:
    """Roles of a part's layers, by names inside it."""
    blocks = BLOCKS.get(_how(module, part), 1)
    column = "colwise" if blocks == 1 else f"packed_colwise:{blocks}"
    shared = {
        name: "replicated_with_grad_allreduce"
        for name, norm in _inside(module, part.between).items()
        if any(True for _ in norm.parameters())
    }
    return (
        dict.fromkeys(_inside(module, part.columns), column)
        | dict.fromkeys(_inside(module, part.rows), "rowwise")
        | shared
    )


def _obstacle(module: nn.Module, part: PartLayers, ranks: int) -> str:
    """Return the reason why a part cannot be cut over so many ranks; "" where it can."""
    class_name, allowed = _how(module, part), HEAD_BY_HEAD if part.counts else tuple(BLOCKS)
    if class_name not in allowed:
        return (
            f"{class_name} is not known to compute {'head by head' if part.counts else 'feature by feature'}"
        )
    rows = {name: features(layer) for name, layer in _inside(module, part.rows).items()}
    columns = {name: features(layer) for name, layer in _inside(module, part.columns).items()}
    if not rows or None in rows.values() or None in columns.values():
        return "it lacks a linear layer behind those that are cut, or one of them is none"
    widths = {sizes[0] for sizes in rows.values() if sizes} | {
        sizes[1] // BLOCKS.get(class_name, 1) for sizes in columns.values() if sizes
    }
    (width, *other_widths), heads = sorted(widths), getattr(module, part.counts) if part.counts else 0
    if other_widths:
        return f"its layers are of several widths: {width}, {', '.join(map(str, other_widths))}"
    if not part.counts:
        return f"{width} features do not divide over {ranks} ranks" if width % ranks else ""
    if width % heads or not has_heads_for(heads, ranks):
        return f"{heads} heads do not go round {ranks} ranks"
    inner = (p.numel() for norm in _inside(module, part.between).values() for p in norm.parameters())
    return "" if all(size == width // heads for size in inner) else "a norm is over all of its heads"


def _of_transformers(name: str, model: nn.Module, ranks: int, parts: Survey) -> dict[str, str]:
    """Globs of a model of transformers inside the model, whole attentions named last; notes these in `found`."""
    try:
        plan = plan_of_transformers(model)
    except PlanError as error:
        parts.whole[name] = str(error).splitlines()[0]
        return {}
    reasons = _short_of_heads(model, plan, ranks)
    if plan.arguments or plan.divided:
        parts.whole[name] = "its plan counts heads in attributes or takes tensors for all heads"
        return {}
    parts.whole |= {f"{name}.{inner}": reason for inner, reason in reasons.items()}
    return {f"{name}.{glob}": role for glob, role in plan.roles.items()} | {
        f"{name}.{inner}.*": "replicated" for inner in reasons
    }


def _short_of_heads(model: nn.Module, plan: Plan, ranks: int) -> dict[str, str]:
    """Attentions with column-cut layers of which a rank would have no head: why they stay whole."""
    reasons = dict[str, str]()
    for name, role in match(plan, model).items():
        above = name.rpartition(".")[0]
        heads = query_heads(model.get_submodule(above)) if role.kind == "colwise" else None
        if heads is not None and not has_heads_for(heads, ranks):
            reasons[above] = f"{heads} heads do not go round {ranks} ranks"
    return reasons


def _as_globs(by_name: Mapping[tuple[str, str], Any], names: list[str]) -> dict[str, Any]:
    """Values of (part, what is inside it) by globs, `*` for numbers of the part, where these name nothing else."""
    by_glob: dict[str, dict[str, Any]] = {}
    for (name, inner), value in by_name.items():
        by_glob.setdefault(pattern(name) + inner, {})[name + inner] = value
    globs: dict[str, Any] = {}
    for glob, values in by_glob.items():
        is_exact = len(set(values.values())) == 1 and set(fnmatch.filter(names, glob)) == values.keys()
        globs |= {glob: next(iter(values.values()))} if is_exact else values
    return globs
