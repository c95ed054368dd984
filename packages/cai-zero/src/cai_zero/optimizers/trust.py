"""Ratios of norms of global parameters (LAMB, LARS)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from cai_mesh.comm import ParallelMesh
from cai_zero.optimizers.base import Entry
from cai_zero.optimizers.sums import square_sums, summed, sums_dtype


def global_norms(
    entries: Sequence[Entry], vectors: Mapping[Entry, torch.Tensor], mesh: ParallelMesh | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Norms of the weight and of a vector of every entry, each [len(entries)], over the full parameter.

    Entries without a vector count as zero, and still take part in the sum over ranks.
    """
    dtype = sums_dtype([e.weight for e in entries])
    empty = torch.zeros(0, dtype=dtype, device=entries[0].weight.device)
    tensors = [e.weight for e in entries] + [vectors.get(e, empty) for e in entries]
    squares = square_sums(tensors, dtype).view(2, -1).t()
    totals = summed(list(squares.contiguous().unbind()), [e.axes for e in entries], mesh)
    norms = torch.stack(totals).sqrt()
    return norms[:, 0], norms[:, 1]


def trust_ratios(
    entries: Sequence[Entry], updates: Mapping[Entry, torch.Tensor], mesh: ParallelMesh | None
) -> dict[Entry, torch.Tensor]:
    """|weight| / |update| of every entry, a scalar tensor, 1 where either is 0."""
    weight, update = global_norms(entries, updates, mesh)
    ratios = torch.where((weight > 0) & (update > 0), weight / update, torch.ones_like(weight))
    return dict(zip(entries, ratios.unbind(), strict=True))
