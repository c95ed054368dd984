"""Builds a mesh from degrees."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.comm.groups import AnyMesh
from cai_mesh.comm.mesh import ParallelMesh
from cai_mesh.comm.spec import MeshSpec


def build_mesh(spec: MeshSpec, *, device_type: str | None = None) -> AnyMesh:
    """A mesh with all five dense axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`.

    The spec's `tp_axes` take the place of `tp`. With `ep` or `etp` it has an expert view of the same ranks, too, and is
    a `ParallelMesh`.

    torch.distributed must be initialized. `device_type` defaults to "cuda" where there is one, else "cpu".
    Raises `MeshError` when the spec does not fit the world size.
    """
    spec = spec.resolve(dist.get_world_size())
    sizes = spec.dimensions()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return mesh if spec.ep * spec.etp == 1 else ParallelMesh.of(mesh, ep=spec.ep, etp=spec.etp)
