"""Attention of the queries of one rank to the keys of whole rows, by any rule that attends on one rank."""

from __future__ import annotations

from dataclasses import replace

import torch

from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionRule
from cai_tensor_parallel.context.cutting import Cut


def attend_pieces(
    row_cut: Cut,
    rule: AttentionRule,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend with a rank's queries to the keys of whole rows; a piece of queries sees no key that comes after it.

    Args:
        query: [B, N, S / ranks, H], the two pieces of the rank.
        key, value: [B, Nkv, S, H] of whole rows, in order.
        call: the arguments of the layer; `cu_seqlens` are those of whole rows.

    Returns [B, N, S / ranks, H]. Raises `PlanError` for masks and prefixes, which are of one rank's tokens.
    """
    check_call(call)
    pieces = zip(query.chunk(2, 2), row_cut.spans(key.shape[2]), strict=True)
    attend = _causal if call.causal else _both_ways
    return torch.cat([attend(rule, part, span, key, value, call) for part, span in pieces], 2)


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


def _causal(
    rule: AttentionRule,
    query: torch.Tensor,
    span: tuple[int, int],
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """The last query stands at the last key, as rules have it; keys before the window of the first are left out."""
    first, end = span
    begin = 0 if call.window is None else max(0, first - call.window + 1)
    documents = None if call.cu_seqlens is None else call.cu_seqlens.clamp(begin, end) - begin
    keys, values = key[:, :, begin:end], value[:, :, begin:end]
    return rule(query, keys, values, replace(call, cu_seqlens=documents))


def _both_ways(
    rule: AttentionRule,
    query: torch.Tensor,
    span: tuple[int, int],
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Queries see what comes after them, too: windows and documents are a mask."""
    plain = replace(call, window=None, cu_seqlens=None)
    if call.window is None and call.cu_seqlens is None:
        return rule(query, key, value, plain)
    places = torch.arange(key.shape[2], device=key.device)
    own_places = places[slice(*span)]
    visible = torch.ones(1, len(own_places), len(places), dtype=torch.bool, device=key.device)
    if call.window is not None:
        visible = visible & ((own_places[:, None] - places).abs() < call.window)
    if call.cu_seqlens is not None:
        rows = places.to(call.cu_seqlens.dtype).expand(len(call.cu_seqlens), -1).contiguous()
        document = torch.searchsorted(call.cu_seqlens, rows, right=True)
        visible = visible & (document[:, slice(*span), None] == document[:, None])
    return rule(query, key, value, replace(plain, mask=visible[:, None]))
