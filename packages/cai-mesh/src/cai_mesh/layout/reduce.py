"""The ranks over which the gradient of a parameter is summed, and what the sum is divided by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cai_mesh.comm.axes import GRADIENT_AXES

if TYPE_CHECKING:
    import torch.distributed as dist


@dataclass(frozen=True)
class ReduceSpec:
    """The way in which ranks combine their gradients of one parameter.

    Args:
        sum_axes: mesh axes over which gradients are added. Axes a mesh lacks are ignored.
        divisor: the number the sum is divided by; None means the number of ranks on `sum_axes`, as in DDP.
        tied: process group of the ranks of *other stages* that hold the same parameter (None: not tied). Their
            gradients are added before anything else.
        owner: whether this copy is the one that counts in norms and is written to checkpoints.
    """

    sum_axes: tuple[str, ...] = GRADIENT_AXES
    divisor: float | None = None
    tied: dist.ProcessGroup | None = None
    owner: bool = True
