"""Who a rank is, and grids of ranks."""

from cai_apps.compat.colossalai.absent import answer
from cai_apps.compat.colossalai.cluster.dist_coordinator import DistCoordinator
from cai_apps.compat.colossalai.cluster.process_group_mesh import ProcessGroupMesh

__all__ = ["DistCoordinator", "ProcessGroupMesh"]

__getattr__ = answer(
    "cluster",
    {
        "DeviceMeshManager": "torch.distributed.device_mesh.init_device_mesh",
        "ProcessGroupManager": "torch.distributed.new_group",
    },
    __all__,
)
