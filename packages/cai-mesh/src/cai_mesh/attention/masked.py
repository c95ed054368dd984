"""Attention in plain torch, all scores under one mask: the twin of every other rule."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cai_mesh.protocols import AttentionCall


def masked_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """`softmax(scale * q @ k.T + mask) @ v`, an `AttentionRule`: q [B, N, Sq, H], k and v [B, Nkv, Sk, H] -> like q.

    Memory is B Sq Sk for the mask, and N times that with a soft cap.
    """
    group = q.shape[1] // k.shape[1]
    if call.softcap is None:
        return F.scaled_dot_product_attention(
            q, k, v, _mask(q, k, call), call.dropout, scale=call.scale, enable_gqa=group > 1
        )
    k, v = (tensor.repeat_interleave(group, 1) for tensor in (k, v))
    scores = call.softcap * torch.tanh(q @ k.transpose(-1, -2) * (call.scale / call.softcap))
    mask = _mask(q, k, call)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).to(q.dtype)
    return F.dropout(weights, call.dropout) @ v


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    rows = places.expand(cu_seqlens.shape[0], length).contiguous()
    document = torch.searchsorted(cu_seqlens, rows, right=True)
    return (document[:, :, None] == document[:, None, :])[:, None]


def _mask(q: torch.Tensor, k: torch.Tensor, call: AttentionCall) -> torch.Tensor | None:
    """All that hides keys, as one mask; None: nothing does."""
    queries, keys = q.shape[-2], k.shape[-2]
    parts = []
    if call.causal or call.window is not None:
        distance = torch.arange(queries, device=q.device)[:, None] + (keys - queries)
        distance = distance - torch.arange(keys, device=q.device)
        visible = distance >= 0 if call.causal else torch.ones_like(distance, dtype=torch.bool)
        parts.append(visible if call.window is None else visible & (distance.abs() < call.window))
    if call.cu_seqlens is not None:
        parts.append(document_mask(call.cu_seqlens, keys)[:, :, keys - queries :])
    mask = None if call.mask is None else call.mask[:, None, None] if call.mask.dim() == 2 else call.mask
    for part in parts:
        if mask is None:
            mask = part
        else:
            mask = mask & part if mask.dtype == torch.bool else mask.masked_fill(~part, -torch.inf)
    return mask
