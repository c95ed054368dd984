"""From axis names to degrees, indices and process groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.errors import MeshError, did_you_mean


def axis_names(mesh: DeviceMesh) -> tuple[str, ...]:
    """Names of the mesh dimensions. Raises `MeshError` for a mesh of more than one unnamed dimension."""
    if mesh.mesh_dim_names:
        return tuple(mesh.mesh_dim_names)
    if mesh.ndim == 1:
        return ("dp_shard",)
    raise MeshError(
        "a mesh has several dimensions and no names", got=mesh, fix="pass mesh_dim_names when building it"
    )


def degree(mesh: DeviceMesh, axes: str | Sequence[str]) -> int:
    """Number of ranks along `axes`; an axis the mesh lacks has one."""
    names, product = axis_names(mesh), 1
    for axis in (axes,) if isinstance(axes, str) else axes:
        product *= mesh.size(names.index(axis)) if axis in names else 1
    return product


def coordinate(mesh: DeviceMesh) -> dict[str, int]:
    """This rank's index along every axis."""
    here = mesh.get_coordinate()
    if here is None:
        raise MeshError("this rank is not part of the mesh", got=f"rank {dist.get_rank()}", expected=mesh)
    return dict(zip(axis_names(mesh), here, strict=True))


def index(mesh: DeviceMesh, axes: str | Sequence[str]) -> int:
    """This rank's row-major index along `axes`, in mesh order whatever theirs: its rank in `group(mesh, axes)`."""
    wanted, position = (axes,) if isinstance(axes, str) else tuple(axes), 0
    for axis, here in coordinate(mesh).items():
        if axis in wanted:
            position = position * degree(mesh, axis) + here
    return position


def group(mesh: DeviceMesh, axes: str | Sequence[str]) -> dist.ProcessGroup | None:
    """The process group along one or several axes (in mesh order), or None for a world of one.

    Ranks are in mesh order. The group of several axes is created, collectively, on first use and kept by the mesh.
    """
    wanted = (axes,) if isinstance(axes, str) else tuple(axes)
    names = axis_names(mesh)
    present = [axis for axis in names if axis in wanted and mesh.size(names.index(axis)) > 1]
    if not present:
        return None
    if len(present) == 1:
        return mesh.get_group(present[0]) if mesh.ndim > 1 else mesh.get_group()
    return mesh[tuple(present)]._flatten("_".join(present)).get_group()


def require_axis(mesh: DeviceMesh, axis: str, what: str) -> None:
    """Raise `MeshError` when the mesh lacks `axis`, which `what` needs."""
    if axis not in axis_names(mesh):
        raise MeshError(
            f"{what} needs a mesh axis {axis!r}",
            got=axis_names(mesh),
            fix=did_you_mean(axis, axis_names(mesh)),
        )
