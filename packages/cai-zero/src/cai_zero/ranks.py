"""Which ranks share the rows of a parameter, and which hold copies."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh import comm
from cai_mesh.comm import AXES, EXPERT_AXES, GRADIENT_AXES
from cai_mesh.errors import MeshError
from cai_mesh.layout import ReduceSpec

_OTHERS = (set(AXES) | set(EXPERT_AXES)) - set(GRADIENT_AXES)


@dataclass(frozen=True)
class DataRanks:
    """The data-parallel axes of a mesh, resolved to process groups (None: a world of one).

    Args:
        mesh: the mesh itself, for norms.
        shard_axes: axes over which rows are divided.
        shard: their process group; `index` of `size` is this rank.
        replicate_axes, replicate: axes and group of ranks that hold the same rows.
    """

    mesh: DeviceMesh | None
    shard_axes: tuple[str, ...]
    shard: dist.ProcessGroup | None
    size: int
    index: int
    replicate_axes: tuple[str, ...]
    replicate: dist.ProcessGroup | None

    @property
    def axes(self) -> tuple[str, ...]:
        return self.replicate_axes + self.shard_axes

    def divisor(self, spec: ReduceSpec) -> float:
        """By what a gradient's sum is divided."""
        if spec.divisor is not None:
            return spec.divisor
        return float(comm.degree(self.mesh, self.axes)) if self.mesh is not None else 1.0

    def other_axes(self, spec: ReduceSpec) -> tuple[str, ...]:
        """Axes a gradient is summed over besides the data axes (tp, for partial gradients)."""
        return tuple(axis for axis in spec.sum_axes if axis not in GRADIENT_AXES and axis not in self.axes)


def second_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Another communicator of the same ranks, for collectives that may run beside those of `group`. Collective."""
    if group is None:
        return None
    backend = group._get_backend(torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu"))
    second = dist.new_group(
        dist.get_process_group_ranks(group),
        backend=dist.get_backend_config(group),
        timeout=backend.options._timeout,
        use_local_synchronization=True,
    )
    assert isinstance(second, dist.ProcessGroup)  # this rank is one of the ranks
    return second


def data_ranks(mesh: DeviceMesh | None, *, sharded: bool = True) -> DataRanks:
    """Find the data axes of a mesh.

    A mesh with any of `dp_replicate, dp_shard, cp` is read by those names: rows are divided over `dp_shard` and
    `cp`, copied over `dp_replicate`. Any other mesh of one dimension divides over it; of two, copies over the first
    and divides over the second. `sharded=False` (stage 0) treats all of them as copies.

    Raises `MeshError` for three unknown dimensions, and where another parallelism's axis would be taken for data.
    """
    if mesh is None:
        return DataRanks(None, (), None, 1, 0, (), None)
    names = comm.axis_names(mesh)
    if any(axis in names for axis in GRADIENT_AXES):
        copies = tuple(a for a in names if a == "dp_replicate")
        rows = tuple(a for a in names if a in ("dp_shard", "cp"))
    elif len(names) <= 2 and not set(names) & _OTHERS:
        copies, rows = names[:-1], names[-1:]
    else:
        raise MeshError(
            "cai-zero cannot tell the data axes of this mesh",
            got=names,
            expected="dp_replicate, dp_shard or cp among the names, or at most two dimensions, all of them for data",
            fix='name the axes, or pass a slice of the mesh such as mesh["data"]',
        )
    if not sharded:
        copies, rows = copies + rows, ()
    return DataRanks(
        mesh,
        rows,
        comm.group(mesh, rows) if rows else None,
        comm.degree(mesh, rows),
        comm.index(mesh, rows),
        copies,
        comm.group(mesh, copies) if copies else None,
    )
