"""Sums over the ranks that share parameters: one collective a mesh axis for all parameters together."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_mesh.comm import ParallelMesh, all_reduce
from cai_mesh.errors import MeshError

Axes = tuple[str, ...]
"""Dimensions of more than one rank over which a parameter is divided, in mesh order."""


def resolve(axes: frozenset[str], mesh: ParallelMesh | None) -> Axes:
    """The dimensions of the mesh for the axes of a parameter. Raises `MeshError` where it lacks one."""
    if not axes:
        return ()
    if mesh is not None and all(mesh.has(axis) for axis in axes):
        mesh.view(tuple(axes))  # raises where no view of the ranks has them all
        return tuple(name for name in mesh.leaves(tuple(axes)) if mesh.degree(name) > 1)
    raise MeshError(
        "a parameter is divided along axes of which the optimizer knows no mesh",
        got=f"{sorted(axes)} with {mesh.names if mesh is not None else 'no mesh'}",
        fix="pass the optimizer mesh=..., the one the parameters were sharded over",
    )


def summed(
    values: Sequence[torch.Tensor], axes: Sequence[Axes], mesh: ParallelMesh | None
) -> list[torch.Tensor]:
    """Sum 1-d tensors, each over the ranks along its own axes; the tensors given are left as they are.

    Args:
        values: tensors of one dtype and device; the same number, lengths and order on all ranks.
        axes: the axes of every value, as `resolve` gives them.

    Values of the same axes travel in one buffer, and each axis is folded once for all buffers that need it, so no
    process group is made for combinations of axes.
    """
    buckets: dict[Axes, list[int]] = {}
    for i, key in enumerate(axes):
        buckets.setdefault(key, []).append(i)
    totals = list(values)
    buffers = {key: torch.cat([values[i] for i in members]) for key, members in buckets.items() if key}
    for name in mesh.names if mesh is not None else ():
        sharing = [key for key in buffers if name in key]
        if not sharing or mesh is None:
            continue
        table = torch.cat([buffers[key] for key in sharing]) if len(sharing) > 1 else buffers[sharing[0]]
        all_reduce(table, mesh.group(name))
        lengths = [buffers[key].numel() for key in sharing]
        buffers.update(zip(sharing, table.split(lengths), strict=True))
    for key, buffer in buffers.items():
        members = buckets[key]
        for i, view in zip(members, buffer.split([values[i].numel() for i in members]), strict=True):
            totals[i] = view
    return totals


def sums_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """The dtype of sums over ranks: float64 where any tensor is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def square_sums(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of every tensor, [len(tensors)] in `dtype`, with nothing waiting for the device."""
    nonempty = [i for i, t in enumerate(tensors) if t.numel()]
    if not nonempty:
        return torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    norms = dict(
        zip(nonempty, torch._foreach_norm([tensors[i] for i in nonempty], 2, dtype=dtype), strict=True)
    )
    zero = torch.zeros_like(norms[nonempty[0]])
    return torch.stack([norms.get(i, zero) for i in range(len(tensors))]).square()
