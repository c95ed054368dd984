"""Degrees, indices and process groups along the axes of a `DeviceMesh` or a `ParallelMesh`."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.comm.mesh import ParallelMesh

AnyMesh = DeviceMesh | ParallelMesh


def degree(mesh: AnyMesh, axes: str | Sequence[str]) -> int:
    """Number of ranks along `axes`; a role that no dimension plays has one."""
    return ParallelMesh.of(mesh).degree(axes)


def coordinate(mesh: AnyMesh) -> dict[str, int]:
    """This rank's index along every dimension."""
    return ParallelMesh.of(mesh).coordinate()


def index(mesh: AnyMesh, axes: str | Sequence[str]) -> int:
    """This rank's row-major index along `axes`, in mesh order whatever theirs: its rank in `group(mesh, axes)`."""
    return ParallelMesh.of(mesh).index(axes)


def group(mesh: AnyMesh, axes: str | Sequence[str]) -> dist.ProcessGroup | None:
    """The process group along one or several axes (in mesh order), or None for a world of one.

    The group of several axes is created, collectively, on first use and kept by the mesh.
    """
    return ParallelMesh.of(mesh).group(axes)


def require_axis(mesh: AnyMesh, axis: str, what: str) -> None:
    """Raise `MeshError` when no dimension of the mesh plays the role `axis`, which `what` needs."""
    ParallelMesh.of(mesh).require(axis, what)
