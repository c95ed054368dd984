"""Lengths of the rows of a layer that ranks share (DoRA, Liu et al., arXiv:2402.09353).

A row's length is of all its inputs: where these are cut, two numbers a row are summed over the ranks in each forward.
Where the rows are cut, each rank measures its own. What is learned about the lengths is cut as the layer's bias is.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

from cai_mesh.adapters import RowRanks
from cai_mesh.comm import Members, copy_to, gather_from, start_sum
from cai_mesh.gradients import TRANSPOSED, own_products
from cai_mesh.layout import Shard
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.modes.head_runs import picked_heads
from cai_tensor_parallel.modes.one_d import sections_of
from cai_tensor_parallel.plans.plan import Role


@dataclass(frozen=True)
class Inputs:
    """The layer's inputs are cut: each rank has a part of every row, and uses all; with `tokens` for its own tokens."""

    ranks: Members
    tokens: bool

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        return start_sum(sums, self.ranks).wait()

    def used(self, numbers: torch.Tensor) -> torch.Tensor:
        return copy_to(numbers, self.ranks.group) if self.tokens else numbers


@dataclass(frozen=True)
class Rows:
    """Each rank has rows of its own, and uses these, or with `gather` so many of all ranks."""

    ranks: Members
    gather: int = 0

    def summed(self, sums: torch.Tensor) -> torch.Tensor:
        return sums

    def used(self, numbers: torch.Tensor) -> torch.Tensor:
        if not self.gather:
            return numbers
        widest = -(-self.gather // self.ranks.size)  # parts may differ by one row
        padded = F.pad(numbers, (0, widest - len(numbers)))
        return gather_from(padded, 0, self.ranks.group)[: self.gather]


@dataclass(frozen=True)
class Heads(Rows):
    """Each rank has all rows, and uses those of some heads: `picked` of `heads`, in this order."""

    heads: int = 1
    picked: tuple[int, ...] = ()

    def used(self, numbers: torch.Tensor) -> torch.Tensor:
        by_head = copy_to(numbers, self.ranks.group).unflatten(0, (self.heads, -1))
        return torch.cat([by_head[head] for head in self.picked])


@dataclass(frozen=True)
class LastRows(Rows):
    """Each rank has all rows, and uses the last `width` in its own way, the others as all do."""

    width: int = 0

    def used(self, numbers: torch.Tensor) -> torch.Tensor:
        numbers = copy_to(numbers, self.ranks.group)
        first, last = numbers[: -self.width], numbers[-self.width :]
        return torch.cat((first if self.ranks.rank == 0 else first.detach(), last))  # a gradient counts once


def share_rows(lengths: nn.Module, layer: nn.Module, role: Role, context: ModeContext) -> None:
    """Let ranks measure the rows of a layer that they share, and cut what is learned about their lengths, in place.

    Args:
        lengths: one of `shareable_lengths`.
        layer: the layer beside which it stands, before it is cut.
        role: the layer's role.
        context: the ranks; its module name is that of the layer with its adapters.
    """
    ranks = Members.of(context.group)
    rows = layer.get_parameter("weight").shape[1 if own_products(layer) is TRANSPOSED else 0]
    shared: RowRanks
    if role.kind.startswith("rowwise"):
        shared = Inputs(ranks, context.sequence is not None and context.module_name not in context.enclosed)
    elif role.kind == "mla_kv_a_proj":
        shared = LastRows(ranks, width=role.width)
    elif role.kind == "kv_heads" and role.heads is not None:
        picked = picked_heads(*role.heads, context.cutter.degree, ranks.rank)
        shared = Heads(ranks, heads=role.heads[1], picked=picked)
    else:
        stay_cut = role.kind in ("colwise", "packed_colwise") or (
            role.kind == "vocab_head" and context.sharded_logits
        )
        shared = Rows(ranks, gather=0 if stay_cut else rows)
        context.cutter.cut(lengths, "weight", Shard(0, sections_of(rows, role, context), role.unit))
    lengths.ranks = shared  # type: ignore[assignment]  (a place that such a module has)
