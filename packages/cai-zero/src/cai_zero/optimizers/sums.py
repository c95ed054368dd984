"""Sums over the ranks that share parameters: one collective a mesh axis for all parameters together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh import comm
from cai_mesh.comm import all_reduce
from cai_mesh.errors import MeshError

Axes = tuple[tuple[int, str], ...]
"""Axes of more than one rank over which a parameter is divided: (number of the mesh, name), in mesh order."""


def resolve(axes: frozenset[str], meshes: Sequence[DeviceMesh]) -> Axes:
    """Find the axes of a parameter on the first mesh that has all of them.

    Raises `MeshError` where none has.
    """
    if not axes:
        return ()
    for number, mesh in enumerate(meshes):
        names = comm.axis_names(mesh)
        if axes <= set(names):
            return tuple((number, a) for a in names if a in axes and comm.degree(mesh, a) > 1)
    raise MeshError(
        "a parameter is divided along axes of which the optimizer knows no mesh",
        got=f"{sorted(axes)} with {[comm.axis_names(mesh) for mesh in meshes] or 'no mesh'}",
        fix="pass the optimizer mesh=..., the one the parameters were sharded over",
    )


def summed(
    values: Sequence[torch.Tensor], axes: Sequence[Axes], meshes: Sequence[DeviceMesh]
) -> list[torch.Tensor]:
    """Sum 1-d tensors, each over the ranks along its own axes; the tensors given are left as they are.

    Args:
        values: of one dtype and device; the same number, lengths and order on all ranks.
        axes: of every value, as `resolve` gives them.

    Values of the same axes travel in one buffer, and each axis is folded once for all buffers that need it, so no
    process group is made for combinations of axes.
    """
    buckets: dict[Axes, list[int]] = {}
    for i, key in enumerate(axes):
        buckets.setdefault(key, []).append(i)
    found = list(values)
    buffers = {key: torch.cat([values[i] for i in members]) for key, members in buckets.items() if key}
    for axis in sorted({axis for key in buffers for axis in key}):
        number, name = axis
        group = comm.group(meshes[number], name)
        sharing = [key for key in buffers if axis in key]
        table = torch.cat([buffers[key] for key in sharing]) if len(sharing) > 1 else buffers[sharing[0]]
        all_reduce(table, group)
        lengths = [buffers[key].numel() for key in sharing]
        buffers.update(zip(sharing, table.split(lengths), strict=True))
    for key, buffer in buffers.items():
        members = buckets[key]
        for i, view in zip(members, buffer.split([values[i].numel() for i in members]), strict=True):
            found[i] = view
    return found


def sums_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """Of sums over ranks: float64 where any tensor is, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


def square_sums(tensors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """The sum of squares of every tensor, [len(tensors)] in `dtype`, with nothing waiting for the device."""
    held = [i for i, t in enumerate(tensors) if t.numel()]
    if not held:
        return torch.zeros(len(tensors), dtype=dtype, device=tensors[0].device)
    found = dict(zip(held, torch._foreach_norm([tensors[i] for i in held], 2, dtype=dtype), strict=True))
    zero = torch.zeros_like(found[held[0]])
    return torch.stack([found.get(i, zero) for i in range(len(tensors))]).square()
