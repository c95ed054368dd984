"""Embeddings with `max_norm`, which write to their weights in forward: ranks with other data would come apart."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cai_mesh.comm import all_reduce
from cai_mesh.errors import PlanError
from cai_zero.reduction.ranks import DataRanks


def renormed(model: nn.Module | None) -> list[torch.Tensor]:
    """Weights that a forward may write to."""
    kinds = (nn.Embedding, nn.EmbeddingBag)
    modules = model.modules() if model is not None else ()
    return [m.weight for m in modules if isinstance(m, kinds) and m.max_norm is not None]


@torch.no_grad()
def check_alike(params: Sequence[torch.Tensor], ranks: DataRanks) -> None:
    """Raise `PlanError`, on all ranks, where they have written other values. Collective, if there is any to check."""
    if not params or ranks.count == 1:
        return
    sums = [(p.double().sum(), p.double().square().sum()) for p in params]
    low = torch.stack([value for pair in sums for value in pair])
    high = low.clone()
    for group in (ranks.copies, ranks.shard):
        all_reduce(low, group, op="min")
        all_reduce(high, group, op="max")
    if not torch.equal(low, high):
        raise PlanError(
            "ranks have written other values to the same weights",
            cause="an embedding with max_norm scales the rows that a rank looks up, and ranks look up other rows",
            fix="leave max_norm out, and clip the rows after the optimizer's step, on all ranks alike",
        )
