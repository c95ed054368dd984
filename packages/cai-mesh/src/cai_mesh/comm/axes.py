"""The axes of a mesh, outermost first."""

from __future__ import annotations

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the dense mesh: pipeline, replicated data, sharded data, context, tensor."""

EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
"""The same ranks as experts see them: `edp * ep * etp == dp_shard * cp * tp`."""

SUB_AXES = {
    "cp": ("ring", "ulysses"),
    "tp": ("tp_row", "tp_col", "tp_depth", "tp_i", "tp_j", "tp_k"),
}
"""Axes that a mesh may have in place of one, outermost first. Layouts name what the mesh has."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different samples."""

GRADIENT_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes over which the gradient of a dense parameter is summed."""

EXPERT_GRADIENT_AXES = ("dp_replicate", "edp")
"""Axes over which the gradient of an expert's parameter is summed."""

SHARD_AXES = ("dp_shard", "cp", "edp")
"""Those axes a gradient is summed over whose ranks may divide the parameter between them."""
