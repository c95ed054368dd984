"""Embedding in plain torch."""

from __future__ import annotations

import torch


def embedding(ids: torch.Tensor, weight: torch.Tensor, padding_idx: int | None) -> torch.Tensor:
    """ids [...], weight [V, D] -> rows of weight [..., D]; the row `padding_idx` gets no gradient."""
    rows = weight[ids]
    if padding_idx is None:
        return rows
    return torch.where((ids == padding_idx)[..., None], rows.detach(), rows)
