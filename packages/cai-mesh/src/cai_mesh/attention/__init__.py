"""The seam of attention: a rule computes what the attention layers of a model of transformers ask for."""

from __future__ import annotations

from cai_mesh.attention.masked import document_mask, masked_attention, prefix_mask
from cai_mesh.attention.parts import MaskedParts
from cai_mesh.attention.registry import (
    NAME,
    attention_layers,
    attention_replaced,
    route_attention,
)

__all__ = [
    "NAME",
    "MaskedParts",
    "attention_layers",
    "attention_replaced",
    "document_mask",
    "masked_attention",
    "prefix_mask",
    "route_attention",
]
