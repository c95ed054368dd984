"""Attention in plain torch, all scores under one mask: the twin of every other rule."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from cai_mesh.protocols import AttentionCall


def masked_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """`softmax(scale * query @ key.T + mask) @ value`, an `AttentionRule`: [B, N, Sq, H] from its queries.

    Memory is B Sq Sk for the mask, and N times that with a soft cap or sinks.
    """
    group = query.shape[1] // key.shape[1]
    if call.softcap is None and call.sinks is None:
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            visible_mask(query, key, call),
            call.dropout,
            scale=call.scale,
            enable_gqa=group > 1,
        )
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    scores = query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    mask = visible_mask(query, key, call)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    if call.sinks is not None:
        sinks = call.sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(query.dtype, torch.float32)).to(query.dtype)
    return F.dropout(weights[..., : key.shape[-2]], call.dropout) @ value


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    rows = places.expand(cu_seqlens.shape[0], length).contiguous()
    document = torch.searchsorted(cu_seqlens, rows, right=True)
    return (document[:, :, None] == document[:, None, :])[:, None]


def last_queries_mask(
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Who sees whom where the queries of each document are the last of its keys: bool [B, 1, queries, keys].

    Args:
        query_starts, key_starts: [B, D + 1] int32, as in `AttentionCall`.
        queries, keys: the number of each in a row.
        causal, window: as there.
    """
    documents, positions = [], []
    for starts, length in ((query_starts, queries), (key_starts, keys)):
        places = torch.arange(length, dtype=starts.dtype, device=starts.device)
        places = places.expand(len(starts), length).contiguous()
        document = torch.searchsorted(starts, places, right=True) - 1
        documents.append(document)
        positions.append(
            places - starts.gather(1, document + 1)
        )  # counted back from the end, where both meet
    visible = documents[0][:, :, None] == documents[1][:, None, :]
    distance = positions[0][:, :, None] - positions[1][:, None, :]
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    return visible[:, None]


def prefix_mask(
    cu_seqlens: torch.Tensor, prefixes: torch.Tensor, length: int, *, causal: bool, window: int | None
) -> torch.Tensor:
    """Who sees whom where documents go on from others, as `AttentionCall.prefixes` says: bool [B, 1, length, length].

    Places are compared by their positions in the sequence that a document and what it goes on from are.

    Args:
        cu_seqlens: [B, D + 1] int32.
        prefixes: [B, D] int32.
        length: tokens of a row.
        causal, window: as in `AttentionCall`.
    """
    starts, prefixes = cu_seqlens.long(), prefixes.long()
    places = torch.arange(length, device=starts.device).expand(starts.shape[0], length).contiguous()
    document = torch.searchsorted(starts, places, right=True) - 1
    before = prefixes.gather(1, document)
    room = starts.diff(dim=1).gather(1, before).masked_fill(before == document, 0)
    position = places - starts.gather(1, document) + room
    keys = document[:, None, :]
    visible = (document[:, :, None] == keys) | (before[:, :, None] == keys)
    query, key = (
        position[:, :, None],
        position[:, None, :],
    )  # compared, for no number of each pair has to be kept
    if causal:
        visible &= key <= query
    if window is not None:
        visible &= key > query - window
        if not causal:
            visible &= key < query + window
    return visible[:, None]


def visible_mask(query: torch.Tensor, key: torch.Tensor, call: AttentionCall) -> torch.Tensor | None:
    """All that hides keys, as one mask; None: nothing does."""
    queries, keys = query.shape[-2], key.shape[-2]
    parts = []
    if call.prefixes is not None:
        assert call.cu_seqlens is not None  # prefixes are numbers of its documents
        options = {"causal": call.causal, "window": call.window}
        parts.append(prefix_mask(call.cu_seqlens, call.prefixes, keys, **options))
    elif call.query_cu_seqlens is not None:
        assert call.cu_seqlens is not None  # of the same documents
        options = {"causal": call.causal, "window": call.window}
        parts.append(last_queries_mask(call.query_cu_seqlens, call.cu_seqlens, queries, keys, **options))
    elif call.causal or call.window is not None:
        distance = torch.arange(queries, device=query.device)[:, None] + (keys - queries)
        distance = distance - torch.arange(keys, device=query.device)
        visible = distance >= 0 if call.causal else torch.ones_like(distance, dtype=torch.bool)
        parts.append(visible if call.window is None else visible & (distance.abs() < call.window))
    if call.cu_seqlens is not None and call.prefixes is None and call.query_cu_seqlens is None:
        parts.append(document_mask(call.cu_seqlens, keys)[:, :, keys - queries :])
    mask = call.mask
    if mask is not None and mask.dim() == 2:  # what is padding sees itself: a softmax of no keys would be NaN
        itself = torch.eye(queries, keys, dtype=torch.bool, device=query.device).roll(keys - queries, 1)
        mask = mask.bool()[:, None, None] | itself
    for part in parts:
        if mask is None:
            mask = part
        else:
            mask = mask & part if mask.dtype == torch.bool else mask.masked_fill(~part, -torch.inf)
    return mask
