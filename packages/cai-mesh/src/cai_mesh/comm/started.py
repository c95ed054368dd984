"""Collectives that are started, and waited for later: between the two the caller issues other work.

Eager they are torch.distributed's asynchronous ones; inside `torch.compile` functional ones, whose wait stays where it
is called. They are not differentiable: a rule of a linear layer calls them in its forward and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from cai_mesh.comm import _functional
from cai_mesh.comm._exit import ran_on


@dataclass(frozen=True)
class Members:
    """A process group as constants, which a graph can hold and a copy of a model can share.

    Args:
        name: of the group.
        size: number of ranks.
        rank: this rank's place.
    """

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Members:
        """Those of a process group."""
        return Members(group.group_name, group.size(), group.rank())

    @property
    def group(self) -> dist.ProcessGroup:
        return dist.distributed_c10d._resolve_process_group(self.name)

    def own_part(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's of equal parts of `x` along `dim`, contiguous."""
        return x.chunk(self.size, dim)[self.rank].contiguous()


@dataclass(frozen=True)
class Started:
    """A `TensorHandle` of a collective's result; `work` is None inside a compiled graph."""

    tensor: torch.Tensor
    work: dist.Work | None

    def wait(self) -> torch.Tensor:
        if self.work is None:
            return _functional.wait(self.tensor)
        self.work.wait()
        return self.tensor


def start_sum(x: torch.Tensor, ranks: Members) -> Started:
    """Start to sum `x` over the ranks. `x` is given away: the sum may be made in its place."""
    if torch.compiler.is_compiling():
        return Started(_functional.start_sum(x, ranks.name), None)
    ran_on(x.device)
    x = x.contiguous()
    return Started(x, dist.all_reduce(x, group=ranks.group, async_op=True))


def gathered(x: torch.Tensor, dim: int, ranks: Members) -> torch.Tensor:
    """The parts `x` of all ranks, of equal size, put together along `dim`."""
    return _functional.gather(x, dim, ranks.name)
