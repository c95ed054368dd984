"""The entry in transformers' registry of attention functions, through which its layers reach their rule.

A model's layers look the function up by a name in their config. `NAME` is in the registry of functions and not in that
of masks: transformers then makes no mask, and does not look at positions for documents, for which the host would wait
in every forward. What a mask would say is in the arguments of the call.
"""

from __future__ import annotations

import contextlib
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from cai_mesh.attention.masked import masked_attention
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionRule

NAME = "cai"
TABLE = "ALL_ATTENTION_FUNCTIONS"
"""The name of transformers' registry, which the forward of a layer that uses it names."""
RULE = "attention_rule"
"""The attribute of a layer that has its rule."""
SINKS = "s_aux"
"""What transformers calls sinks, those of gpt-oss and others."""


def route_attention(model: nn.Module, rule: AttentionRule, *, window: bool | None = None) -> list[str]:
    """Let the attention layers of a model of transformers compute by a rule; return their names.

    The model's forward then takes `cu_seqlens` [B, D + 1] int32 beside `position_ids` [B, S] that restart with every
    document; and `prefixes` [B, D] int32, where documents go on from others, as their positions do. Whether the model
    keeps documents apart is not shown by that: its other layers may mix them.

    Args:
        model: a model of transformers on any device, or the part of one that `split` left.
        rule: the computation; `masked_attention` is the plain one.
        window: only layers that have a sliding window, or only those that have none; None: all.

    Raises:
        PlanError: the model's layers do not look attention up where it could be exchanged.
    """
    layers = dict(attention_layers(model))
    if not layers:
        raise PlanError(
            "the attention of this model cannot be exchanged",
            got=type(model).__name__,
            cause="none of its layers looks its attention up in transformers' registry of attention functions",
            fix="take a model that does, as most of transformers do (LLaMA, Qwen, Gemma, Mistral, Phi, GPT-2)",
        )
    if window is not None:
        layers = {name: layer for name, layer in layers.items() if _has_window(layer) == window}
    for layer in layers.values():
        _table(layer).register(NAME, attend)
        setattr(layer, RULE, rule)
        layer.config._attn_implementation = NAME  # type: ignore[union-attr]
    return list(layers)


@contextlib.contextmanager
def attention_replaced(model: nn.Module, rule_of: Callable[[str], AttentionRule]) -> Iterator[None]:
    """Inside, the attention layers of a model compute by other rules; afterwards by theirs again, also on an error.

    Args:
        model: as in `route_attention`.
        rule_of: the rule of a layer, by the layer's name in the model.

    Raises:
        PlanError: as `route_attention`.
    """
    layers = dict(attention_layers(model))
    before = [
        (layer, layer.__dict__.get(RULE), layer.config._attn_implementation) for layer in layers.values()
    ]  # type: ignore[union-attr]
    try:
        route_attention(model, masked_attention)
        for name, layer in layers.items():
            setattr(layer, RULE, rule_of(name))
        yield
    finally:
        for layer, rule, implementation in before:
            layer.__dict__.pop(RULE, None)
            if rule is not None:
                setattr(layer, RULE, rule)
            layer.config._attn_implementation = implementation  # type: ignore[union-attr]


def attention_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules, with their names, whose forward takes its attention from transformers' registry."""
    for name, module in model.named_modules():
        if hasattr(module, "config") and _table(module) is not None:
            yield name, module


def _table(module: nn.Module) -> Any:
    """The registry that the code of a module's forward names; None: it names none."""
    source = inspect.unwrap(type(module).forward)
    if not isinstance(source, types.FunctionType) or TABLE not in _names(source):
        return None
    return source.__globals__.get(TABLE)


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Compute what a layer of transformers asks for by the layer's rule; the registry's function under `NAME`.

    Args:
        module: the layer.
        query, key, value: [B, N, Sq, H] and [B, Nkv, Sk, H].
        attention_mask: as in `AttentionCall`.
        options: those that transformers gives every such function, `cu_seqlens` and `prefixes`.

    Returns [B, Sq, N, H], and no weights.
    """
    scaling, causal = options.get("scaling"), options.get("is_causal")
    call = AttentionCall(
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=getattr(module, "is_causal", True) if causal is None else causal,
        window=options.get("sliding_window"),
        softcap=options.get("softcap"),
        dropout=options.get("dropout", 0.0),
        cu_seqlens=options.get("cu_seqlens"),
        mask=attention_mask,
        prefixes=options.get("prefixes"),
        sinks=options.get(SINKS),
    )
    rule: AttentionRule = getattr(module, RULE, masked_attention)
    return rule(query, key, value, call).transpose(1, 2).contiguous(), None  # models take a view of it


def _has_window(layer: nn.Module) -> bool:
    """Whether a layer slides: as it says itself, or by its kind in the config."""
    window = getattr(layer, "sliding_window", None)
    kinds, number = getattr(layer.config, "layer_types", None), getattr(layer, "layer_idx", None)
    if kinds and number is not None:
        return kinds[number] == "sliding_attention"
    return window is not None


def _names(source: types.FunctionType) -> set[str]:
    return {name for code in _codes(source.__code__) for name in code.co_names}


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)
