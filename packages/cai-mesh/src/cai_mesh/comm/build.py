"""Builds a torch `DeviceMesh` from degrees."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cai_mesh.comm.spec import MeshSpec


def build_mesh(spec: MeshSpec, *, device_type: str | None = None) -> DeviceMesh:
    """A mesh with all five dense axes, outermost first: `pp, dp_replicate, dp_shard, cp, tp`.

    The spec's `tp_axes` take the place of `tp`.

    torch.distributed must be initialized. `device_type` defaults to "cuda" where there is one, else "cpu".
    Raises `MeshError` when the spec does not fit the world size.
    """
    sizes = spec.resolve(dist.get_world_size()).dimensions()
    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
