"""Rules of attention for layers whose tokens lie on several ranks; each brings something to where it is needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.attention import masked_attention
from cai_mesh.comm import all_gather, swap_shards
from cai_mesh.errors import PlanError
from cai_mesh.protocols import AttentionCall, AttentionRule
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.pieces import attend_pieces, check_call

MODES = ("gather", "ulysses")
"""Names of the rules."""


@dataclass(frozen=True)
class GatheredKeys:
    """Keys and values of whole rows come to every rank, which attends to them with its own queries.

    As in LLaMA 3's training (arXiv:2407.21783): with few heads of keys they are small beside the rest of a layer.

    Args:
        group: the ranks.
        row_cut: the cut of rows over them.
        rule: the attention of one rank.
    """

    group: dist.ProcessGroup
    row_cut: Cut
    rule: AttentionRule = masked_attention

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attend; an `AttentionRule`. Collective."""
        _check_lengths(query, key)
        key, value = (self.row_cut.in_order(all_gather(rows, 2, self.group), 2) for rows in (key, value))
        return attend_pieces(self.row_cut, self.rule, query, key, value, call)


@dataclass(frozen=True)
class ExchangedHeads:
    """Each rank has some heads of whole rows while it attends (Jacobs et al., "Ulysses", arXiv:2309.14509).

    Heads of keys are repeated where there are fewer than ranks.

    Args:
        group: the ranks.
        row_cut: the cut of rows over them.
        rule: the attention of one rank.
    """

    group: dist.ProcessGroup
    row_cut: Cut
    rule: AttentionRule = masked_attention

    def __call__(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> torch.Tensor:
        """Attend; an `AttentionRule`. Collective."""
        _check_lengths(query, key)
        check_call(call)
        check_heads(query.shape[1], self.row_cut.ranks)
        heads = key.shape[1]
        repeats = math.lcm(heads, self.row_cut.ranks) // heads
        if query.shape[1] % (heads * repeats):  # then each head of queries has keys of its own
            repeats = query.shape[1] // heads
        key, value = (rows.repeat_interleave(repeats, 1) if repeats > 1 else rows for rows in (key, value))
        query, key, value = (
            self.row_cut.in_order(swap_shards(rows, 2, 1, self.group), 2) for rows in (query, key, value)
        )
        output = self.row_cut.by_rank(self.rule(query, key, value, call), 2)
        return swap_shards(output, 1, 2, self.group)


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
