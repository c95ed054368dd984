"""The ranks that share a parameter's shards and those that hold copies, by the parameter's reduce spec."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import (
    AXES,
    EXPERT_AXES,
    SHARD_AXES,
    AnyMesh,
    ParallelMesh,
    Turns,
    all_gather_object,
    axis_names,
)
from cai_mesh.errors import MeshError
from cai_mesh.layout import ReduceSpec

COPY_AXES = ("dp_replicate",)


@dataclass(frozen=True)
class DataRanks:
    """The ranks of one reduce spec, resolved to process groups (None: a world of one).

    Args:
        shard_axes: dimensions of the mesh over which the parameter is divided.
        shard: their process group; `index` of `size` is this rank.
        copy_axes, copies: dimensions and group of ranks that hold the same shards.
        partial: group of other ranks whose gradients are parts of a sum (tensor parallelism).
        divisor: the number by which the sum is divided.
    """

    shard_axes: tuple[str, ...] = ()
    shard: dist.ProcessGroup | None = None
    size: int = 1
    index: int = 0
    copy_axes: tuple[str, ...] = ()
    copies: dist.ProcessGroup | None = None
    partial: dist.ProcessGroup | None = None
    divisor: float = 1.0

    @property
    def count(self) -> int:
        """Number of ranks whose gradients are summed, partial sums not counted."""
        return self.size * (self.copies.size() if self.copies is not None else 1)


@dataclass(frozen=True)
class _Axes:
    """Dimensions of the mesh a spec sums over."""

    shard: tuple[str, ...]
    copies: tuple[str, ...]
    partial: tuple[str, ...]


class RankTable:
    """The `DataRanks` of every reduce spec of a model.

    A mesh's data axes are found by their roles (`cai_mesh.ParallelMesh`): parameters are divided over `dp_shard` and
    `cp`, an expert's over `edp`, and copied over `dp_replicate`. A mesh of one dimension with a name of its own divides
    over that.

    Args:
        mesh: None: one process.
        specs: the reduce specs of this rank's parameters. Ranks may have different ones (pipeline stages).
        sharded: False (stage 0) treats all data axes as copies.

    Attributes:
        turns: the collectives that the ranks which share the dense parameters begin, compared.

    Collective over the mesh: groups of several axes are made here. Raises `MeshError` for a mesh without data axes, or
    without the axes that a spec names, or with axes of experts beside those of dense parameters.
    """

    def __init__(self, mesh: AnyMesh | None, specs: Iterable[ReduceSpec] = (), *, sharded: bool = True):
        self.mesh = None if mesh is None else ParallelMesh.of(mesh, alone="dp_shard")
        self._sharded = sharded
        self._ranks_by_spec: dict[ReduceSpec, DataRanks] = {}
        self.turns = Turns(())
        if self.mesh is None:
            return
        if not any(self.mesh.has(role) for role in ("dp_replicate", "dp_shard", "cp")):
            raise MeshError(
                "cai-zero finds no data axes on this mesh",
                got=self.mesh.names,
                expected="dp_replicate, dp_shard or cp among the names, or one dimension of any other name",
                fix='say which they are, ParallelMesh.of(mesh, axes={"dp_shard": "NAME"}), or pass a slice of the mesh',
            )
        named = set(specs)
        _check_experts(self.mesh, named)
        self._make_groups({self._axes(spec) for spec in (*named, ReduceSpec())})
        self.turns = Turns((self.of().copies, self.of().shard))

    def _axes(self, spec: ReduceSpec) -> _Axes:
        assert self.mesh is not None
        axes_by_kind: dict[str, list[str]] = {"shard": [], "copies": [], "partial": []}
        for axis in spec.sum_axes:
            kind = "copies" if axis in COPY_AXES else "shard" if axis in SHARD_AXES else "partial"
            if kind == "shard" and not self._sharded:
                kind = "copies"
            axes_by_kind[kind] += self.mesh.leaves(axis)
        return _Axes(*(self.mesh.leaves(names) for names in axes_by_kind.values()))

    def _make_groups(self, all_axes: set[_Axes]) -> None:
        """Every rank of the mesh makes the groups that any rank needs, in one order."""
        assert self.mesh is not None
        for view in self.mesh.names:
            all_axes = set().union(*all_gather_object(all_axes, self.mesh.group(view)))
        for axes in sorted(all_axes, key=lambda a: (a.shard, a.copies, a.partial)):
            for names in (axes.shard, axes.copies, axes.partial):
                self.mesh.group(names)

    def of(self, spec: ReduceSpec = ReduceSpec()) -> DataRanks:  # noqa: B008 (frozen)
        """Return the ranks of one spec; the default one is that of a dense parameter."""
        if spec not in self._ranks_by_spec:
            self._ranks_by_spec[spec] = self._resolve(spec)
        return self._ranks_by_spec[spec]

    def _resolve(self, spec: ReduceSpec) -> DataRanks:
        mesh = self.mesh
        if mesh is None:
            return DataRanks(divisor=1.0 if spec.divisor is None else spec.divisor)
        axes = self._axes(spec)
        return DataRanks(
            axes.shard,
            mesh.group(axes.shard),
            mesh.degree(axes.shard),
            mesh.index(axes.shard),
            axes.copies,
            mesh.group(axes.copies),
            mesh.group(axes.partial),
            float(mesh.degree(axes.shard) * mesh.degree(axes.copies))
            if spec.divisor is None
            else spec.divisor,
        )


def _check_experts(mesh: ParallelMesh, specs: Iterable[ReduceSpec]) -> None:
    """Raise `MeshError` where dense parameters lie on ranks along an axis that only experts are reduced over."""
    only = set(EXPERT_AXES) - set(AXES)
    names = {leaf for role in only if mesh.has(role) for leaf in mesh.leaves(role)}
    experts = [name for name in axis_names(mesh.dense) if name in names and mesh.degree(name) > 1]
    if experts and any(not only & set(spec.sum_axes) for spec in specs):
        raise MeshError(
            f"dense parameters would not be reduced over axis {experts[0]!r} of this mesh: its ranks would part",
            got=axis_names(mesh.dense),
            expected=f"a mesh of the axes {AXES} for dense parameters, and a view of the same ranks for experts",
            fix="name the ranks that read different samples dp_shard, and pass ParallelMesh.of(mesh, ep=...)",
        )


def groups_along(
    mesh: ParallelMesh | None, axes: Collection[str]
) -> tuple[tuple[dist.ProcessGroup, ...], bool]:
    """The groups, one a dimension, of ranks among which a tensor is divided along `axes`; and whether those are all.

    They are not where the mesh lacks an axis, or has pipeline stages, which hold other parameters.
    """
    if mesh is None:
        return (), not axes
    mesh_axes = [axis for axis in axes if mesh.has(axis)]
    groups = (mesh.group(name) for name in mesh.leaves(mesh_axes))
    complete = len(mesh_axes) == len(axes) and (not mesh.has("pp") or mesh.degree("pp") == 1)
    return tuple(group for group in groups if group is not None), complete


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
