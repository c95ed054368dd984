"""The parameters of a layer of experts, cut by expert: each rank of `ep` keeps the rows of its own."""

from __future__ import annotations

from torch import nn

from cai_mesh.comm import DATA_AXES, EXPERT_GRADIENT_AXES, ParallelMesh
from cai_mesh.layout import ReduceSpec, Shard, attach_to
from cai_tensor_parallel.experts.finding import ExpertsRole, owner_of
from cai_tensor_parallel.modes.cutter import Cutter


def keep_own(layer: nn.Module, role: ExpertsRole, cutter: Cutter) -> None:
    """Replace the stacked parameters of a layer by this rank's part of them, with its layout."""
    for name in role.parameters:
        cutter.cut(*owner_of(layer, name), Shard(0))


def reduce_among_copies(layer: nn.Module, role: ExpertsRole, mesh: ParallelMesh) -> None:
    """Let gradients be summed over the ranks that hold the same experts.

    Tokens of all ranks came to an expert already, so the sum is divided by the number of data ranks, as for all others.
    """
    spec = ReduceSpec(EXPERT_GRADIENT_AXES, divisor=float(mesh.degree(DATA_AXES)))
    for name in role.parameters:
        attach_to(*owner_of(layer, name), reduce=spec)
