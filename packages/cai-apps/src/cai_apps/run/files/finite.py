"""Whether everything that a checkpoint would hold is finite."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cai_mesh.layout import BoxedTensor


def not_finite(state: Mapping[str, Any]) -> list[str]:
    """Names of the tensors of a state of which a value on any rank is NaN or infinite, sorted. Collective.

    Args:
        state: as for `cai_mesh.checkpoint.save`; what is no tensor of floating point is not looked at.

    Each value is read once; nothing as large as a tensor is made.
    """
    names_by_rank: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(names_by_rank, _own(state))
    return sorted(set().union(*names_by_rank))


def _own(state: Mapping[str, Any]) -> list[str]:
    names, largest = [], []
    for name, value in state.items():
        for part in _parts(value):
            if part.is_floating_point() and part.numel():
                wide = part.float() if part.itemsize == 1 else part
                names.append(name)
                largest.append(torch.linalg.vector_norm(wide, float("inf")).to(torch.float64))
    if not names:
        return []
    finite = torch.stack([norm.cpu() for norm in largest]).isfinite()
    return [name for name, good in zip(names, finite.tolist(), strict=True) if not good]


def _parts(value: Any) -> list[Tensor]:
    """What this rank holds of a tensor."""
    if isinstance(value, Tensor):
        value = BoxedTensor.from_param(value)
    return [view for _, view in value.present.pieces] if isinstance(value, BoxedTensor) else []
