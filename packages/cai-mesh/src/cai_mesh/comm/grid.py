"""Grids of ranks in place of the axis `tp`. Without torch: a config is checked with these before it is loaded."""

from __future__ import annotations

from cai_mesh.errors import PlanError, did_you_mean

GRID_AXES = {
    "2d": ("tp_row", "tp_col"),
    "2.5d": ("tp_depth", "tp_row", "tp_col"),
    "3d": ("tp_i", "tp_j", "tp_k"),
}
"""Axes that play `tp`, outermost first, by the name of the algorithm."""


def sub_axes(mode: str, degree: int, depth: int = 1) -> dict[str, int]:
    """Degrees of the axes that play `tp` in a mode, outermost first.

    Args:
        mode: "1d", "2d", "2.5d" or "3d".
        degree: ranks in all.
        depth: the number of grids that hold the same weights, in 2.5d.

    Raises `PlanError` for another mode, and where the mode has no such number of ranks: 2d takes q x q, 2.5d
    depth x q x q, 3d l x l x l, with q and l of 2 at least.
    """
    if mode == "1d":
        return {"tp": degree}
    if mode not in GRID_AXES:
        raise PlanError("unknown tensor-parallel mode", got=mode, fix=did_you_mean(mode, ["1d", *GRID_AXES]))
    if depth < 1:
        raise PlanError("the depth of a grid is too small", got=depth, expected="at least 1")
    power = 3 if mode == "3d" else 2
    shared = depth if mode == "2.5d" else 1
    side = round((degree / shared) ** (1 / power))
    if degree % shared or side**power * shared != degree or (side == 1 and degree > 1):
        form = {"2d": "q x q", "2.5d": f"{depth} x q x q", "3d": "l x l x l"}[mode]
        near = sorted({max(side + step, 2) ** power * shared for step in (-1, 0, 1)})
        raise PlanError(
            f"mode {mode} has no grid of this many ranks",
            got=f"{degree} ranks" + (f" with depth {depth}" if mode == "2.5d" else ""),
            expected=f"{form}: {', '.join(map(str, near))}",
            fix="change the tensor-parallel degree"
            + (", the depth" if mode == "2.5d" else "")
            + " or the mode",
        )
    return {name: depth if name == "tp_depth" else side for name in GRID_AXES[mode]}
