"""Roles that know the heads of a model: head counts, key/value heads that ranks share, rotary features."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_tensor_parallel.modes.feature_counts import features
from cai_tensor_parallel.modes.head_runs import has_heads_for, own_heads, queries_per_pick
from cai_tensor_parallel.plans.matching import match
from cai_tensor_parallel.plans.plan import Plan, Role

COUNTS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
"""Names that attention modules have for the number of their query heads."""
KEY_VALUE = ("k_proj", "v_proj", "key_proj", "value_proj", "key", "value", "wk", "wv")
"""Names of layers that make keys or values."""
GROUPS = "num_key_value_groups"
"""Attribute of an attention module: query heads that share a key/value head, which transformers repeats as often."""


def informed(model: nn.Module, roles: Mapping[str, Role], degree: int) -> dict[str, Role]:
    """The roles of a model with the head counts and widths that 1d needs.

    A column-cut key or value layer whose heads do not divide over the ranks gets the role kv_heads; one with as many
    heads as the queries is cut as they are. Raises `PlanError` where heads do not divide and the model does not say how
    its query heads share them.
    """
    informed_roles = dict(roles) | _in_heads(model, roles, degree)
    for name, role in roles.items():
        if role.parameter:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if role.kind == "mla_kv_a_proj":
            informed_roles[name] = replace(role, width=_rotary_width(name, parent, model))
        elif role.kind == "colwise" and name.rpartition(".")[2] in KEY_VALUE:
            heads = _heads(parent, model)
            if heads is not None and heads[1] % degree and informed_roles[name].unit == 1:
                _check_shared(name, parent, heads, degree)
                informed_roles[name] = replace(role, kind="kv_heads", heads=heads)
    return informed_roles


def uneven_attentions(model: nn.Module, roles: Mapping[str, Role], degree: int) -> dict[str, int]:
    """Query heads by name of an attention with column-cut layers, where they do not divide over the ranks."""
    by_attention = dict[str, int]()
    for name, role in roles.items():
        above = name.rpartition(".")[0]
        parent = model.get_submodule(above)
        if role.parameter or role.kind not in ("colwise", "packed_colwise") or not _is_attention(parent):
            continue
        heads = _first((parent, _text_config(model)), *COUNTS)
        if heads is not None and heads % degree:
            _check_enough(above, heads, degree)
            by_attention[above] = heads
    heads = _first((_text_config(model),), *COUNTS)
    if heads is not None and heads % degree and not by_attention:
        raise PlanError(
            "the attention heads do not divide over the tensor-parallel ranks",
            got=f"{heads} attention heads over {degree} ranks",
            fix=f"choose a degree that divides {heads}",
        )
    return by_attention


def _is_attention(module: nn.Module) -> bool:
    return any(isinstance(getattr(module, name, None), int) for name in (GROUPS, *COUNTS))


def query_heads(attention: nn.Module) -> int | None:
    """Query heads of an attention module, as it says itself; None where it says nothing."""
    return _first((attention,), *COUNTS)


def _check_enough(name: str, heads: int, degree: int) -> None:
    """Raise `PlanError` where a rank would have no head."""
    if not has_heads_for(heads, degree):
        enough = [d for d in range(2, heads + 1) if has_heads_for(heads, d)]
        raise PlanError(
            "the attention heads do not go round the tensor-parallel ranks",
            got=f"{heads} attention heads of {name or 'the model'} over {degree} ranks: with"
            f" {len(own_heads(heads, degree, 0))} each the last one has none",
            fix=f"choose a degree among {', '.join(map(str, enough))}",
        )


def check_uneven(
    by_attention: Mapping[str, int], mode: str, degree: int, small: nn.Module | None, plan: Plan
) -> None:
    """Raise `PlanError` for heads that do not divide, in a mode that cannot cut them or where no trial has some.

    Args:
        by_attention: `uneven_attentions`.
        small: the model that the plan is tried on, over two ranks; None: there is none.
    """
    name, heads = next(iter(by_attention.items()))
    got = f"{heads} attention heads of {name} over {degree} ranks"
    if mode != "1d":
        raise PlanError(
            "the attention heads do not divide over the ranks that share features",
            got=got,
            cause=f"mode {mode} cuts all features alike",
            fix=f'choose a degree that divides {heads}, or mode="1d"',
        )
    if any(fnmatch.fnmatchcase(name, glob) for name in by_attention for glob in plan.arguments):
        raise PlanError(
            "the attention heads do not divide over the tensor-parallel ranks",
            got=f"{got}, and tensors for all heads as arguments: {dict(plan.arguments)}",
            fix=f"choose a degree that divides {heads}",
        )
    if small is None or not uneven_attentions(small, match(plan, small, strict=False), 2):
        raise PlanError(
            "the attention heads do not divide over the tensor-parallel ranks, and no small model can show that"
            " this is right",
            got=got,
            cause="there is no trial, or the heads of its small model divide over its two ranks",
            fix=f"choose a degree that divides {heads}, or pass trial=Trial(...) with an odd number of heads",
        )


def _in_heads(model: nn.Module, roles: Mapping[str, Role], degree: int) -> dict[str, Role]:
    """Roles of the layers of uneven attentions, which are cut between heads."""
    by_layer = dict[str, Role]()
    for attention, heads in uneven_attentions(model, roles, degree).items():
        inside = {n: r for n, r in roles.items() if n.rpartition(".")[0] == attention and not r.parameter}
        widths = {n: _features(model, n)[1] // r.blocks for n, r in inside.items()}
        shared = (_heads(model.get_submodule(attention), model) or (heads, heads))[1]
        width = max(
            (w for n, w in widths.items() if inside[n].kind != "rowwise" and w % heads == 0), default=0
        )
        for name, role in inside.items():
            has_fewer = shared != heads and name.rpartition(".")[2] in KEY_VALUE
            if role.kind in ("colwise", "packed_colwise") and widths[name] % heads == 0 and not has_fewer:
                by_layer[name] = replace(role, unit=widths[name] // heads)
        rows = [n for n, r in roles.items() if r.kind == "rowwise" and not r.parameter]
        inner_rows = [n for n in rows if n.startswith(attention + ".")]
        around = attention.rpartition(".")[0] + "."
        for name in inner_rows or [n for n in rows if n.startswith(around)]:
            if _features(model, name)[0] == width:
                by_layer[name] = replace(roles[name], unit=width // heads)
    return by_layer


def _features(model: nn.Module, name: str) -> tuple[int, int]:
    """Input and output features of a linear layer; zeros of what is none."""
    return features(model.get_submodule(name)) or (0, 0)


def shared_heads_of(model: nn.Module) -> int:
    """Key/value heads by the config; 0 where it does not say, which every degree divides."""
    return _first((_text_config(model),), "num_key_value_heads") or 0


def shares_heads(roles: Mapping[str, Role]) -> bool:
    """Whether ranks share key/value heads of which a model has more than one."""
    return any(role.heads is not None and role.heads[1] > 1 for role in roles.values())


def regroup(model: nn.Module, roles: Mapping[str, Role], degree: int) -> None:
    """Tell attention modules how many query heads use each of the key/value heads that a rank computes with."""
    for name, role in roles.items():
        if role.heads is not None:
            parent = model.get_submodule(name.rpartition(".")[0])
            setattr(parent, GROUPS, queries_per_pick(*role.heads, degree))


def _heads(parent: nn.Module, model: nn.Module) -> tuple[int, int] | None:
    """(query heads, key/value heads) of an attention module: of the config where the module does not say."""
    text = _text_config(model)
    queries = _first((parent, text), *COUNTS)
    groups = getattr(parent, GROUPS, None)
    if queries is None:
        return None
    if isinstance(groups, int):
        return queries, queries // groups
    shared = _first((parent, text), "num_key_value_heads")
    return None if shared is None else (queries, shared)


def _check_shared(name: str, parent: nn.Module, heads: tuple[int, int], degree: int) -> None:
    """Raise `PlanError` for key/value heads that ranks cannot share."""
    queries, shared = heads
    divides = queries % shared == 0
    if divides and isinstance(getattr(parent, GROUPS, None), int):
        return
    raise PlanError(
        "the key/value heads do not divide over the tensor-parallel ranks",
        got=f"{shared} key/value heads of {name} and {queries} attention heads over {degree} ranks",
        cause=f"{type(parent).__name__} has no {GROUPS}, by which ranks could share them"
        if divides
        else None,
        fix=f"choose a degree that divides {shared if divides else queries}",
    )


def _rotary_width(name: str, parent: nn.Module, model: nn.Module) -> int:
    width = _first((parent, _text_config(model)), "qk_rope_head_dim")
    if width is None:
        raise PlanError(
            f"{name} has the role mla_kv_a_proj, and its rotary features are not known",
            expected="qk_rope_head_dim of its attention module or of the config",
            fix="give it the role replicated, or cut no heads of this attention",
        )
    return width


def _text_config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if isinstance(config, Mapping):  # of diffusers: its attentions say their heads, which differ
        return None
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first(holders: tuple[Any, ...], *names: str) -> int | None:
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None
