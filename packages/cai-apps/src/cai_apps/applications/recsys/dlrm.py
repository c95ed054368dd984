"""DLRM (Naumov et al., arXiv:1906.00091): an MLP, embedding tables, their dot products, another MLP."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn


class DLRM(nn.Module):
    """The log-odds of a click.

    Args:
        dense: real-valued features.
        bottom: widths of the MLP over them; the last is the dim of the tables' embeddings.
        tables: one module for each categorical feature, from ids [B, L] to embeddings [B, D].
        top: hidden widths of the MLP over the interactions.
    """

    def __init__(self, dense: int, bottom: Sequence[int], tables: Sequence[nn.Module], top: Sequence[int]):
        super().__init__()
        vectors = len(tables) + 1
        self.bottom = mlp([dense, *bottom], last=True)
        self.tables = nn.ModuleList(tables)
        self.top = mlp([bottom[-1] + vectors * (vectors - 1) // 2, *top, 1], last=False)

    def forward(self, dense: torch.Tensor, ids: Sequence[torch.Tensor]) -> torch.Tensor:
        """Log-odds [B] of `dense` [B, F] and one tensor of ids [B, L] for each table."""
        x = self.bottom(dense)
        vectors = torch.stack(
            [x, *(table(table_ids) for table, table_ids in zip(self.tables, ids, strict=True))], 1
        )
        return self.top(torch.cat([x, interactions(vectors)], 1)).squeeze(1)


def interactions(vectors: torch.Tensor) -> torch.Tensor:
    """Dot products of all pairs of vectors [B, V, D], each pair once: [B, V (V - 1) / 2]."""
    count = vectors.shape[1]
    row, column = torch.tril_indices(count, count, -1, device=vectors.device)
    return torch.bmm(vectors, vectors.transpose(1, 2))[:, row, column]


def mlp(widths: Sequence[int], *, last: bool) -> nn.Sequential:
    """Linear layers with ReLU between them, and after the last one if `last`."""
    layers: list[nn.Module] = []
    for i, (inward, outward) in enumerate(pairwise(widths), start=2):
        layers.append(nn.Linear(inward, outward))
        if last or i < len(widths):
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
