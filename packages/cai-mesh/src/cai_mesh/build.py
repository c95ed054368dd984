"""From degrees to a torch `DeviceMesh`, and from axis names to process groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cai_mesh.axes import AXES, EXPERT_AXES
from cai_mesh.errors import MeshError, did_you_mean
from cai_mesh.spec import MeshSpec


def build_mesh(spec: MeshSpec, *, device_type: str | None = None) -> DeviceMesh:
    """A mesh with all five dense axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`.

    torch.distributed must be initialized. `device_type` defaults to "cuda" where there is one, else "cpu".
    Raises `MeshError` when the spec does not fit the world size.
    """
    sizes = spec.resolve(dist.get_world_size()).sizes()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=AXES)


def build_expert_mesh(spec: MeshSpec, *, device_type: str | None = None) -> DeviceMesh:
    """The same ranks with axes `pp, dp_replicate, edp, ep, etp`."""
    spec = spec.resolve(dist.get_world_size())
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    shape = (spec.pp, spec.dp_replicate, spec.edp, spec.ep, spec.etp)
    return init_device_mesh(device_type, shape, mesh_dim_names=EXPERT_AXES)


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
