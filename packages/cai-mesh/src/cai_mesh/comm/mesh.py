"""One view of the ranks for dense layers, one for experts, and the roles their dimensions play."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.comm.axes import AXES, EXPERT_AXES, SUB_AXES
from cai_mesh.errors import MeshError, did_you_mean

ROLES = tuple(dict.fromkeys((*AXES, *EXPERT_AXES)))
KNOWN = (*ROLES, *(leaf for leaves in SUB_AXES.values() for leaf in leaves))
UNNAMED = "ranks"
"""The name of the only dimension of a mesh that has none."""


def axis_names(mesh: DeviceMesh | ParallelMesh) -> tuple[str, ...]:
    """Names of the mesh dimensions. Raises `MeshError` for a mesh of more than one unnamed dimension."""
    if isinstance(mesh, ParallelMesh):
        mesh = mesh.dense
    if mesh.mesh_dim_names:
        return tuple(mesh.mesh_dim_names)
    if mesh.ndim == 1:
        return (UNNAMED,)
    raise MeshError(
        "a mesh has several dimensions and no names", got=mesh, fix="pass mesh_dim_names when building it"
    )


@dataclass(frozen=True)
class ParallelMesh:
    """The ranks of a job as dense layers and, where there are any, as experts see them.

    An axis is asked for by its role (`tp`) or by a dimension's own name. A role stands for the dimension of that name,
    for its sub-axes where the mesh has these (`tp_row, tp_col` for `tp`), or for what `axes` gave it. A role that no
    dimension plays has one rank. Make one with `ParallelMesh.of`; every function of cai that takes a mesh takes this
    or a torch `DeviceMesh`.

    Attributes:
        dense: the mesh whose axes are those of `cai_mesh.comm.AXES`, or some of them.
        expert: the same ranks with the axes of `EXPERT_AXES`, or None.
        roles: role to the names of its dimensions, outermost first, where their own names do not tell.
    """

    dense: DeviceMesh
    expert: DeviceMesh | None = None
    roles: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @staticmethod
    def of(
        mesh: DeviceMesh | ParallelMesh,
        *,
        axes: Mapping[str, str | Sequence[str]] | None = None,
        alone: str | None = None,
        ep: int | None = None,
        etp: int = 1,
        expert: DeviceMesh | None = None,
    ) -> ParallelMesh:
        """Return the `ParallelMesh` of a user's mesh.

        Args:
            mesh: its dimensions carry known names, or are one, or are told by `axes`.
            axes: role to the dimension, or dimensions, that plays it: `{"dp_shard": "data", "tp": "model"}`.
            alone: the role of a mesh's only dimension if its name tells none.
            ep, etp: degrees of an expert view to be made of the ranks of `dp_shard`, `cp` and `tp`; collective, over
                all ranks of the job, which `mesh` must cover.
            expert: an expert view made elsewhere, of the same ranks.

        Raises `MeshError` for a dimension whose role nobody knows, and for an expert view that does not fit.
        """
        if isinstance(mesh, ParallelMesh):
            if axes or ep is not None or expert is not None:
                raise MeshError("this mesh has its roles already", got=mesh, fix="pass the DeviceMesh itself")
            return mesh
        names = axis_names(mesh)
        roles = {r: (d,) if isinstance(d, str) else tuple(d) for r, d in (axes or {}).items()}
        _check_roles(roles, names)
        strangers = [n for n in names if n not in KNOWN and not any(n in dims for dims in roles.values())]
        if strangers and len(names) == 1:
            if alone is not None:
                roles[alone] = names
        elif strangers:
            raise MeshError(
                f"nobody knows what axis {strangers[0]!r} of this mesh is for",
                got=names,
                expected=", ".join(KNOWN),
                fix="say so: ParallelMesh.of(mesh, axes={"
                + ", ".join(f'"ROLE": "{name}"' for name in strangers)
                + "}), or pass a slice of the mesh",
            )
        dense = ParallelMesh(mesh, None, roles)
        if ep is not None:
            expert = _expert_view(dense, ep, etp)
        return dense if expert is None else ParallelMesh(mesh, _checked(expert, mesh), roles)

    def __deepcopy__(self, memo: dict) -> ParallelMesh:
        return self  # process groups belong to the process

    @property
    def device_type(self) -> str:
        return self.dense.device_type

    def size(self) -> int:
        """Number of ranks."""
        return self.dense.size()

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """All dimensions of all views."""
        return tuple(dict.fromkeys(name for view in self.views for name in axis_names(view)))

    @property
    def views(self) -> tuple[DeviceMesh, ...]:
        return (self.dense,) if self.expert is None else (self.dense, self.expert)

    def leaves(self, axes: str | Sequence[str]) -> tuple[str, ...]:
        """The dimensions that play some roles, or carry these names, in mesh order; none for a role nobody plays.

        Raises `MeshError` for a name that is neither a role nor a dimension, and for an expert's role where the mesh
        has no expert view.
        """
        dims: set[str] = set()
        for axis in (axes,) if isinstance(axes, str) else axes:
            dims.update(self._leaves_of(axis))
        return tuple(name for name in self.names if name in dims)

    def _leaves_of(self, axis: str) -> tuple[str, ...]:
        dims = self._played(axis)
        if dims or axis in AXES or (axis in KNOWN and axis not in EXPERT_AXES):
            return dims
        if axis in EXPERT_AXES and self.expert is None:
            raise MeshError(
                f"a mesh without an expert view was asked for axis {axis!r}",
                got=axis_names(self.dense),
                fix="pass ParallelMesh.of(mesh, ep=...)",
            )
        names = self.names
        raise MeshError(f"the mesh has no axis {axis!r}", got=names, fix=did_you_mean(axis, {*names, *ROLES}))

    def _played(self, axis: str) -> tuple[str, ...]:
        if axis in self.roles:
            return self.roles[axis]
        if axis in self.names:
            return (axis,)
        return tuple(leaf for leaf in SUB_AXES.get(axis, ()) if leaf in self.names)

    def has(self, axis: str) -> bool:
        """Whether a dimension plays this role or carries this name."""
        return bool(self._played(axis))

    def degree(self, axes: str | Sequence[str]) -> int:
        """Number of ranks along `axes`."""
        return math.prod(self._size(name) for name in self.leaves(axes))

    def _size(self, name: str) -> int:
        view = next(view for view in self.views if name in axis_names(view))
        return view.size(axis_names(view).index(name))

    def coordinate(self) -> dict[str, int]:
        """This rank's index along every dimension of every view."""
        coordinate: dict[str, int] = {}
        for view in self.views:
            indices = view.get_coordinate()
            if indices is None:
                raise MeshError(
                    "this rank is not part of the mesh", got=f"rank {dist.get_rank()}", expected=view
                )
            coordinate.update(zip(axis_names(view), indices, strict=True))
        return coordinate

    def index(self, axes: str | Sequence[str]) -> int:
        """This rank's row-major index along `axes`, in mesh order whatever theirs: its rank in `group(axes)`."""
        position, coordinate = 0, self.coordinate()
        for name in self.leaves(axes):
            position = position * self._size(name) + coordinate[name]
        return position

    def view(self, axes: str | Sequence[str]) -> DeviceMesh:
        """The view that has all of these axes. Raises `MeshError` where none has."""
        names = [name for name in self.leaves(axes) if self._size(name) > 1]
        for view in self.views:
            if set(names) <= set(axis_names(view)):
                return view
        raise MeshError(
            "no view of the ranks has all of these axes",
            got=tuple(names),
            expected=" or ".join(str(axis_names(view)) for view in self.views),
        )

    def group(self, axes: str | Sequence[str]) -> dist.ProcessGroup | None:
        """The process group along one or several axes, ranks in mesh order, or None for a world of one.

        The group of several axes is created, collectively, on first use and kept by the mesh.
        """
        present = [name for name in self.leaves(axes) if self._size(name) > 1]
        if not present:
            return None
        view = self.view(present)
        if len(present) == 1:
            return view.get_group(present[0]) if view.ndim > 1 else view.get_group()
        return view[tuple(present)]._flatten("_".join(present)).get_group()

    def require(self, axis: str, what: str) -> None:
        """Raise `MeshError` when no dimension plays the role `axis`, which `what` needs."""
        if not self.has(axis):
            raise MeshError(
                f"{what} needs a mesh axis {axis!r}",
                got=axis_names(self.dense),
                fix=did_you_mean(axis, axis_names(self.dense)),
            )


def _check_roles(roles: Mapping[str, tuple[str, ...]], names: Sequence[str]) -> None:
    unknown = [role for role in roles if role not in ROLES]
    if unknown:
        raise MeshError(
            f"there is no role {unknown[0]!r}", got=dict(roles), fix=did_you_mean(unknown[0], ROLES)
        )
    listed = [dim for dims in roles.values() for dim in dims]
    missing = [dim for dim in listed if dim not in names]
    if missing or len(set(listed)) != len(listed):
        raise MeshError(
            "axes name each dimension of the mesh at most once",
            got=dict(roles),
            expected=f"names among {tuple(names)}",
        )


def _expert_view(mesh: ParallelMesh, ep: int, etp: int) -> DeviceMesh:
    """The ranks of `dp_shard`, `cp` and `tp` regrouped; every rank of the job makes it."""
    dense, names = mesh.dense, axis_names(mesh.dense)
    if dense.mesh.numel() != dist.get_world_size():
        raise MeshError(
            "an expert view is made of all ranks of the job",
            got=f"a mesh of {dense.mesh.numel()} ranks out of {dist.get_world_size()}",
            fix="derive it from the whole mesh, not from a slice",
        )
    outer = [name for role in ("pp", "dp_replicate") for name in mesh.leaves(role)]
    inner = [name for role in ("dp_shard", "cp", "tp") for name in mesh.leaves(role)]
    sizes = [mesh.degree(role) for role in ("pp", "dp_replicate")]
    ranks = mesh.degree(inner)
    if ep < 1 or etp < 1 or ranks % (ep * etp):
        raise MeshError(
            "the expert axes do not divide the ranks they regroup",
            got=f"ep {ep} x etp {etp}",
            expected=f"a divisor of dp_shard x cp x tp = {ranks}",
        )
    order = [names.index(name) for name in (*outer, *inner)]
    table = dense.mesh.permute(order).reshape(*sizes, ranks // (ep * etp), ep, etp)
    shared = [(*mesh.leaves(role), role)[0] for role in ("pp", "dp_replicate")]  # one name for one thing
    return DeviceMesh(dense.device_type, table, mesh_dim_names=(*shared, *EXPERT_AXES[2:]))


def _checked(expert: DeviceMesh, dense: DeviceMesh) -> DeviceMesh:
    strangers = [name for name in axis_names(expert) if name not in (*EXPERT_AXES, *axis_names(dense))]
    if strangers or sorted(expert.mesh.flatten().tolist()) != sorted(dense.mesh.flatten().tolist()):
        raise MeshError(
            "this is no expert view of the mesh",
            got=f"{axis_names(expert)} over {expert.mesh.numel()} ranks",
            expected=f"axes among {EXPERT_AXES}, over the same {dense.mesh.numel()} ranks",
        )
    return expert
