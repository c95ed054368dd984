"""A grid of ranks with groups along its axes."""

from __future__ import annotations

from torch.distributed.device_mesh import init_device_mesh

from cai_apps.booster.launch import need_launch, rank_device
from cai_apps.booster.places import RankGrid

__all__ = ["ProcessGroupMesh"]


class ProcessGroupMesh(RankGrid):
    """All ranks of the job as a grid of some sizes, outermost first. Collective.

    Args:
        size: ranks along each axis.
    """

    def __init__(self, *size: int):
        need_launch("ProcessGroupMesh")
        names = tuple(f"axis{number}" for number in range(len(size)))
        super().__init__(init_device_mesh(rank_device().type, size, mesh_dim_names=names))
