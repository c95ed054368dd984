"""The axes of a mesh, outermost first."""

from __future__ import annotations

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes of the dense mesh: pipeline, replicated data, sharded data, context, tensor."""

EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep", "etp")
"""The same ranks as experts see them: `edp * ep * etp == dp_shard * cp * tp`."""

DATA_AXES = ("dp_replicate", "dp_shard")
"""Axes whose ranks read different samples."""

GRADIENT_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes over which the gradient of a dense parameter is summed."""
