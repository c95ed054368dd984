"""Attention of the queries of one rank to the keys of all, by any rule that attends on one rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionRule
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.documents import DocumentCut, cut_of


def attend_pieces(
    row_cut: Cut,
    rule: AttentionRule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend with a rank's queries to the keys of all ranks; a piece of queries sees no key that comes after it.

    Args:
        query: [B, N, S / ranks, H], the two pieces of the rank.
        key, value: [B, Nkv, S, H] of all ranks, rank after rank.
        call: the arguments of the layer; `cu_seqlens` are those of whole rows.

    Returns [B, N, S / ranks, H]. Raises `PlanError` for masks and prefixes, which are of one rank's tokens.
    """
    check_call(call)
    documents = cut_of(row_cut, call.cu_seqlens, key.shape[2])
    if not call.causal:
        return _both_ways(documents, rule, query, key, value, call)
    pieces = list(zip(query.chunk(2, 2), row_cut.pieces, strict=True))
    if isinstance(documents, DocumentCut):
        return torch.cat([_causal(documents, rule, *piece, key, value, call) for piece in pieces], 2)
    key, value = row_cut.in_order(key, 2), row_cut.in_order(value, 2)
    return torch.cat([_causal_rows(rule, *piece, key, value, call) for piece in pieces], 2)


def check_call(call: AttentionCall) -> None:
    """Raise `PlanError` for what attention over ranks cannot honour."""
    if call.mask is not None:
        raise PlanError(
            "attention over ranks takes no mask",
            got=f"attention_mask {tuple(call.mask.shape)}",
            cause="it is of this rank's tokens, and keys are of all ranks",
            fix="cut the batch with cut_batch, which turns a mask of padding into documents",
        )
    if call.prefixes is not None:
        raise PlanError(
            "attention over ranks takes no documents that go on from others",
            got=f"prefixes {tuple(call.prefixes.shape)}",
            fix="leave prefixes out, or train on whole rows",
        )


def _causal_rows(
    rule: AttentionRule,
    query: torch.Tensor,
    number: int,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Rows of one document: the last query stands at the last key, and keys before the window of the first stay out."""
    size = query.shape[2]
    first, end = number * size, (number + 1) * size
    begin = 0 if call.window is None else max(0, first - call.window + 1)
    return rule(query, key[:, :, begin:end], value[:, :, begin:end], call)


def _causal(
    documents: DocumentCut,
    rule: AttentionRule,
    query: torch.Tensor,
    number: int,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend in rows of documents: the last query of each stands at the last of its keys."""
    keys, values = (documents.keys_seen(rows, number) for rows in (key, value))
    starts, query_starts = documents.key_starts(number), documents.piece_starts(number)
    return rule(query, keys, values, replace(call, cu_seqlens=starts, query_cu_seqlens=query_starts))


def _both_ways(
    documents: Cut | DocumentCut,
    rule: AttentionRule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Queries see what comes after them, too: windows and documents are a mask."""
    key, value = documents.in_order(key, 2), documents.in_order(value, 2)
    plain = replace(call, window=None, cu_seqlens=None)
    if call.window is None and call.cu_seqlens is None:
        return rule(query, key, value, plain)
    places = torch.arange(key.shape[2], device=key.device)
    own_places = documents.places(key.shape[2], key.device)
    visible = torch.ones(1, 1, 1, dtype=torch.bool, device=key.device)
    if call.window is not None:
        visible = visible & ((own_places[:, :, None] - places).abs() < call.window)
    if call.cu_seqlens is not None:
        rows = places.to(call.cu_seqlens.dtype).expand(len(call.cu_seqlens), -1).contiguous()
        document = torch.searchsorted(call.cu_seqlens, rows, right=True)
        visible = visible & (document.gather(1, own_places)[:, :, None] == document[:, None])
    return rule(query, key, value, replace(plain, mask=visible[:, None]))
