"""Which key/value heads a rank needs, and what roles must be told of a model to know: head counts, rotary features."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from cai_mesh.errors import PlanError
from cai_tensor_parallel.plan import Role

KEY_VALUE = ("k_proj", "v_proj", "key_proj", "value_proj", "key", "value", "wk", "wv")
"""Names of layers that make keys or values."""
GROUPS = "num_key_value_groups"
"""Of an attention module: how many query heads share a key/value head, which transformers repeats by it."""


def picked_heads(queries: int, shared: int, degree: int, rank: int) -> tuple[int, ...]:
    """The key/value heads of a rank's query heads, each for `queries_per_pick` query heads in turn.

    Args:
        queries: query heads, a multiple of `degree` and of `shared`.
        shared: key/value heads.
        degree, rank: ranks, and this one.
    """
    own, each = queries // degree, queries_per_pick(queries, shared, degree)
    return tuple((rank * own + first) * shared // queries for first in range(0, own, each))


def queries_per_pick(queries: int, shared: int, degree: int) -> int:
    """How many query heads use each of `picked_heads`."""
    return math.gcd(queries // degree, queries // shared)


def informed(model: nn.Module, roles: Mapping[str, Role], degree: int) -> dict[str, Role]:
    """The roles of a model with the head counts and widths that 1d needs.

    A column-cut key or value layer whose heads do not divide over the ranks gets the role kv_heads. Raises `PlanError`
    where heads do not divide and the model does not say how its query heads share them.
    """
    found = dict(roles)
    for name, role in roles.items():
        if role.parameter:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if role.kind == "mla_kv_a_proj":
            found[name] = replace(role, width=_rotary_width(name, parent, model))
        elif role.kind == "colwise" and name.rpartition(".")[2] in KEY_VALUE:
            heads = _heads(parent, model)
            if heads is not None and heads[1] % degree:
                _check_shared(name, parent, heads, degree)
                found[name] = replace(role, kind="kv_heads", heads=heads)
    return found


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
    queries = _first((parent, text), "num_heads", "num_attention_heads")
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
    divides = queries % degree == 0 and queries % shared == 0
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
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _first(holders: tuple[Any, ...], *names: str) -> int | None:
    for holder in holders:
        for name in names:
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return None
