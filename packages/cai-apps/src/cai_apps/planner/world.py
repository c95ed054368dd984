"""A mesh of many ranks in one process: groups exist, collectives move nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from cai_mesh.comm import AnyMesh, MeshSpec, build_mesh


@contextmanager
def imaginary_rank(spec: MeshSpec, rank: int) -> Iterator[AnyMesh]:
    """The mesh of `spec` as rank `rank` of it would see it. torch.distributed must not be initialized yet."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=spec.world_size)
    try:
        yield build_mesh(spec, device_type="cpu")
    finally:
        dist.destroy_process_group()
