"""The norm of many tensors in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def global_norm(tensors: Sequence[torch.Tensor], p: float) -> torch.Tensor:
    """The p-norm of all values of `tensors`, on the device of the first: 0-d float32 (float64 if any is)."""
    device = tensors[0].device
    wide = torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32
    norms = [torch.linalg.vector_norm(t, p, dtype=wide) for t in tensors if t.numel()]
    if not norms:
        return torch.zeros((), dtype=wide, device=device)
    return torch.linalg.vector_norm(torch.stack([n.to(device) for n in norms]), p)
