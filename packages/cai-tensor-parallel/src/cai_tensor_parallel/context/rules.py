"""Rules of attention for layers whose tokens lie on several ranks; each brings something to where it is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cai_mesh.attention import MaskedParts, masked_attention
from cai_mesh.comm import Members, all_gather, swap_shards
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionParts, AttentionRule
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.documents import cut_of
from cai_tensor_parallel.context.pieces import attend_pieces, check_call
from cai_tensor_parallel.context.ring import ring_attention


@dataclass(frozen=True)
class RowRanks:
    """The ranks that have a row together.

    Args:
        group: the ranks.
        row_cut: the cut of rows over them.
        rule: the attention of one rank.
        parts: the class of the same, to some keys at a time.
    """

    group: dist.ProcessGroup
    row_cut: Cut
    rule: AttentionRule = masked_attention
    parts: type[AttentionParts] = MaskedParts


def gather_keys(
    ranks: RowRanks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Attend with a rank's own queries to keys and values of whole rows, which come to every rank. Collective.

    As in LLaMA 3's training (arXiv:2407.21783): with few heads of keys they are small beside the rest of a layer. With
    its first argument given, an `AttentionRule`.
    """
    _check_lengths(query, key)
    key, value = (all_gather(rows, 2, ranks.group) for rows in (key, value))
    return attend_pieces(ranks.row_cut, ranks.rule, query, key, value, call)


def exchange_heads(
    ranks: RowRanks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Attend with some heads of whole rows, for which ranks exchange their tokens. Collective.

    As in Ulysses (Jacobs et al., arXiv:2309.14509). Heads of keys are repeated where there are fewer than ranks. With
    its first argument given, an `AttentionRule`.
    """
    _check_lengths(query, key)
    check_call(call)
    size, group = ranks.row_cut.ranks, ranks.group
    check_heads(query.shape[1], size)
    heads = key.shape[1]
    repeats = math.lcm(heads, size) // heads
    if query.shape[1] % (heads * repeats):  # then each head of queries has keys of its own
        repeats = query.shape[1] // heads
    key, value = (rows.repeat_interleave(repeats, 1) if repeats > 1 else rows for rows in (key, value))
    documents = cut_of(ranks.row_cut, call.cu_seqlens, query.shape[2] * size)
    query, key, value = (
        documents.in_order(swap_shards(rows, 2, 1, group), 2) for rows in (query, key, value)
    )
    if call.sinks is not None:
        call = replace(call, sinks=call.sinks.chunk(size)[ranks.row_cut.index])
    output = documents.by_rank(ranks.rule(query, key, value, call), 2)
    return swap_shards(output, 1, 2, group)


def pass_keys(
    ranks: RowRanks, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
) -> torch.Tensor:
    """Attend with a rank's own queries to keys and values that go from rank to rank (`ring`). Collective.

    Layers with a window gather keys: what their queries see is not passed around the ring. With its first argument
    given, an `AttentionRule`. Raises `PlanError` for dropout, which no rank could repeat.
    """
    _check_lengths(query, key)
    check_call(call)
    if call.window is not None:
        return gather_keys(ranks, query, key, value, call)
    if call.dropout:
        raise PlanError(
            'mode "ring" has no dropout of attention',
            got=f"a probability of {call.dropout}",
            fix='choose mode "gather", or a config whose attention_dropout is 0',
        )
    missing = key.shape[-1] - value.shape[-1]
    if missing:  # both travel as one
        wide = torch.nn.functional.pad(value, (0, missing))
        return pass_keys(ranks, query, key, wide, call)[..., : value.shape[-1]]
    return ring_attention(Members.of(ranks.group), ranks.parts, query, key, value, call)


RULES = {"gather": gather_keys, "ulysses": exchange_heads, "ring": pass_keys}
"""Rules by the name of their mode."""


def check_heads(heads: int, ranks: int) -> None:
    """Raise `PlanError` where heads of queries do not divide over the ranks of mode "ulysses"."""
    if heads % ranks:
        raise PlanError(
            "the heads of this model do not divide over the ranks of its context",
            got=f"{heads} heads over {ranks} ranks",
            expected=f"a multiple of {ranks}",
            fix='choose mode "gather", or a degree that divides them',
        )


def _check_lengths(query: torch.Tensor, key: torch.Tensor) -> None:
    if query.shape[2] != key.shape[2]:
        raise PlanError(
            "attention over ranks has queries and keys of the same tokens",
            got=f"{query.shape[2]} queries, {key.shape[2]} keys",
            cause="a cache of keys, or attention to another sequence",
            fix="call the model with use_cache=False",
        )
