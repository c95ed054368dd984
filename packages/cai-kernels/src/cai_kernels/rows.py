"""Tensors [..., D] as rows [T, D], without a copy if the strides allow it."""

from __future__ import annotations

import torch


def as_rows(x: torch.Tensor) -> torch.Tensor:
    """x [..., D] as [T, D] with contiguous columns: a view if the leading dims can be merged, else a copy."""
    columns = x.shape[-1]
    if x.dim() != 2:
        x = x.reshape(x.numel() // columns if columns else 0, columns)
    return x if columns <= 1 or x.stride(1) == 1 else x.contiguous()
