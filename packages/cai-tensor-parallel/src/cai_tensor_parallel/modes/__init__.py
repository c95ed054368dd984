"""Algorithms by mode, and the axes each needs."""

from __future__ import annotations

import math
from collections.abc import Callable

from torch import nn

from cai_mesh.comm import ParallelMesh, sub_axes
from cai_mesh.errors import MeshError, PlanError, did_you_mean
from cai_tensor_parallel.modes import grid, one_d
from cai_tensor_parallel.modes.context import ModeContext
from cai_tensor_parallel.modes.forms import GRIDS
from cai_tensor_parallel.plans.plan import Role

MODES: dict[str, Callable[[nn.Module, Role, ModeContext], None]] = {
    "1d": one_d.apply,
    **dict.fromkeys(GRIDS, grid.apply),
}
"""Mode name to the function that gives one module its role: cuts its parameters and replaces its forward."""


def check_mode(mode: str) -> None:
    """Raise `PlanError` for a mode that there is not."""
    if mode not in MODES:
        raise PlanError("unknown tensor-parallel mode", got=mode, fix=did_you_mean(mode, MODES))


def check_axes(mode: str, mesh: ParallelMesh) -> None:
    """Raise `MeshError` where the dimensions that play `tp` are not those of the mode, or their degrees not alike."""
    if mode not in GRIDS:
        return
    mode_axes, mesh_axes = GRIDS[mode].axes, mesh.leaves("tp")
    sizes = {name: mesh.degree(name) for name in mesh_axes}
    sides = {size for name, size in sizes.items() if name != "tp_depth"}
    if mesh_axes == mode_axes and len(sides) == 1:
        return
    raise MeshError(
        f"mode {mode} needs a mesh with axes {', '.join(mode_axes)}",
        got=sizes or "no axis tp",
        expected="the axes in this order, all of one degree"
        + (" but for tp_depth" if mode == "2.5d" else ""),
        fix=_axes_fix(mode, math.prod(sizes.values())),
    )


def _axes_fix(mode: str, degree: int) -> str:
    try:
        sizes = sub_axes(mode, degree)
    except PlanError:
        return "another number of tensor-parallel ranks"
    return f"init_device_mesh(..., {tuple(sizes.values())}, mesh_dim_names={tuple(sizes)})"
