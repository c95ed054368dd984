"""Ranks and what they say to each other: meshes, groups, collectives, copies between GPUs, side streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cai_mesh._lazy import lazy

if TYPE_CHECKING:
    from cai_mesh.comm.autograd import (
        all_gather,
        all_to_all,
        copy_to,
        gather_from,
        reduce_from,
        reduce_scatter,
        scatter_to,
        shift,
        swap_shards,
    )
    from cai_mesh.comm.axes import (
        AXES,
        DATA_AXES,
        EXPERT_AXES,
        EXPERT_GRADIENT_AXES,
        GRADIENT_AXES,
        SHARD_AXES,
        SUB_AXES,
    )
    from cai_mesh.comm.build import build_mesh
    from cai_mesh.comm.collectives import (
        Op,
        all_gather_into,
        all_gather_object,
        all_reduce,
        all_to_all_into,
        broadcast,
        reduce_scatter_into,
    )
    from cai_mesh.comm.grid import GRID_AXES, sub_axes
    from cai_mesh.comm.groups import AnyMesh, coordinate, degree, group, index, require_axis
    from cai_mesh.comm.handles import Done
    from cai_mesh.comm.mesh import ParallelMesh, axis_names
    from cai_mesh.comm.p2p import receive, send, start_exchange
    from cai_mesh.comm.peer import PeerGather, PeerReduce, Peers, check_device
    from cai_mesh.comm.spec import MeshSpec
    from cai_mesh.comm.started import (
        Members,
        Started,
        gathered,
        start_broadcast,
        start_scatter_sum,
        start_shift,
        start_sum,
        start_sum_at,
    )
    from cai_mesh.comm.streams import SideStream
    from cai_mesh.comm.turns import Turns

__all__ = [
    "AXES",
    "DATA_AXES",
    "EXPERT_AXES",
    "EXPERT_GRADIENT_AXES",
    "GRADIENT_AXES",
    "GRID_AXES",
    "SHARD_AXES",
    "SUB_AXES",
    "AnyMesh",
    "Done",
    "Members",
    "MeshSpec",
    "Op",
    "ParallelMesh",
    "PeerGather",
    "PeerReduce",
    "Peers",
    "SideStream",
    "Started",
    "Turns",
    "all_gather",
    "all_gather_into",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_into",
    "axis_names",
    "broadcast",
    "build_mesh",
    "check_device",
    "coordinate",
    "copy_to",
    "degree",
    "gather_from",
    "gathered",
    "group",
    "index",
    "receive",
    "reduce_from",
    "reduce_scatter",
    "reduce_scatter_into",
    "require_axis",
    "scatter_to",
    "send",
    "shift",
    "start_broadcast",
    "start_exchange",
    "start_scatter_sum",
    "start_shift",
    "start_sum",
    "start_sum_at",
    "sub_axes",
    "swap_shards",
]

__getattr__ = lazy(
    __name__,
    {
        "autograd": (
            "all_gather",
            "all_to_all",
            "copy_to",
            "gather_from",
            "gathered",
            "reduce_from",
            "reduce_scatter",
            "scatter_to",
            "shift",
            "swap_shards",
        ),
        "axes": (
            "AXES",
            "DATA_AXES",
            "EXPERT_AXES",
            "EXPERT_GRADIENT_AXES",
            "GRADIENT_AXES",
            "SHARD_AXES",
            "SUB_AXES",
        ),
        "build": ("build_mesh",),
        "collectives": (
            "Op",
            "all_gather_into",
            "all_gather_object",
            "all_reduce",
            "all_to_all_into",
            "broadcast",
            "reduce_scatter_into",
        ),
        "groups": ("AnyMesh", "coordinate", "degree", "group", "index", "require_axis"),
        "handles": ("Done",),
        "mesh": ("ParallelMesh", "axis_names"),
        "p2p": ("receive", "send", "start_exchange"),
        "peer": ("PeerGather", "PeerReduce", "Peers", "check_device"),
        "grid": ("GRID_AXES", "sub_axes"),
        "spec": ("MeshSpec",),
        "started": (
            "Members",
            "Started",
            "gathered",
            "start_broadcast",
            "start_scatter_sum",
            "start_shift",
            "start_sum",
            "start_sum_at",
        ),
        "streams": ("SideStream",),
        "turns": ("Turns",),
    },
)
