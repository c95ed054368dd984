"""The degrees of a mesh, checked against the number of ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from cai_mesh.comm.axes import AXES, SUB_AXES
from cai_mesh.errors import MeshError


@dataclass(frozen=True)
class MeshSpec:
    """Degrees of parallelism, outermost axis first. One of the five dense axes may be -1: the rest of the ranks.

    `ep` (expert) and `etp` (tensor inside an expert) regroup the ranks of `dp_shard * cp * tp` and add none.
    """

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    tp_axes: tuple[tuple[str, int], ...] = ()
    """Dimensions in place of `tp`, outermost first, with degrees that make it: (("tp_row", 2), ("tp_col", 2))."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.name == "tp_axes":
                continue
            degree = getattr(self, field.name)
            open_axis = degree == -1 and field.name in AXES
            if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and not open_axis):
                raise MeshError(
                    f"mesh axis {field.name!r} has an impossible degree",
                    got=degree,
                    expected="a positive integer"
                    + (", or -1 for the rest of the ranks" if field.name in AXES else ""),
                )
        if sum(getattr(self, axis) == -1 for axis in AXES) > 1:
            raise MeshError("more than one mesh axis is -1", got=self, expected="at most one axis left open")
        self._check_tensor()

    def sizes(self) -> dict[str, int]:
        """Degree by dense axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    def dimensions(self) -> dict[str, int]:
        """Degree by dimension of the mesh, outermost first: those of `tp_axes` in place of `tp`."""
        dense = self.sizes()
        return (
            dense if not self.tp_axes else {a: d for a, d in dense.items() if a != "tp"} | dict(self.tp_axes)
        )

    @property
    def world_size(self) -> int:
        """Number of ranks. Raises `MeshError` while an axis is -1."""
        if -1 in self.sizes().values():
            raise MeshError("the mesh has an open axis", got=self, fix="call resolve(world_size) first")
        return math.prod(self.sizes().values())

    def resolve(self, world_size: int) -> MeshSpec:
        """The spec with its open axis filled in. Raises `MeshError` when the degrees do not make `world_size`."""
        sizes = self.sizes()
        fixed = math.prod(degree for degree in sizes.values() if degree != -1)
        product = " x ".join(f"{axis} {degree}" for axis, degree in sizes.items())
        open_axis = next((axis for axis, degree in sizes.items() if degree == -1), None)
        if world_size < 1 or world_size % fixed or (open_axis is None and fixed != world_size):
            needed = f"a multiple of {fixed} ranks" if open_axis else f"{fixed} ranks"
            raise MeshError(
                "the mesh does not fit the number of ranks",
                got=f"{world_size} ranks for {product}",
                expected=needed,
                fix="change the degrees or start another number of ranks",
            )
        spec = replace(self, **{open_axis: world_size // fixed}) if open_axis else self
        spec._check_experts()
        return spec

    def _check_tensor(self) -> None:
        unknown = [name for name, _ in self.tp_axes if name not in SUB_AXES["tp"]]
        if unknown or (self.tp_axes and math.prod(degree for _, degree in self.tp_axes) != self.tp):
            raise MeshError(
                "the dimensions that take the place of tp do not make it",
                got=f"tp {self.tp} as {dict(self.tp_axes)}",
                expected=f"some of {', '.join(SUB_AXES['tp'])}, whose degrees multiply to {self.tp}",
            )

    def _check_experts(self) -> None:
        ranks = self.dp_shard * self.cp * self.tp
        if ranks % (self.ep * self.etp):
            raise MeshError(
                "the expert axes do not divide the ranks they regroup",
                got=f"ep {self.ep} x etp {self.etp}",
                expected=f"a divisor of dp_shard x cp x tp = {ranks}",
            )

    @property
    def edp(self) -> int:
        """Degree of data parallelism among copies of an expert."""
        return self.dp_shard * self.cp * self.tp // (self.ep * self.etp)
