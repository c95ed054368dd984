"""Collectives that are started, and waited for later: between the two the caller issues other work.

Eager they are torch.distributed's asynchronous ones; inside `torch.compile` functional ones, whose wait stays where it
is called. They are not differentiable: a rule of a linear layer calls them in its forward and its backward.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from cai_mesh.comm import _functional
from cai_mesh.comm._exit import ran_on

_scatter_sum = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Members:
    """A process group as constants, which a graph can hold and a copy of a model can share.

    Args:
        name: the group's name.
        size: number of ranks.
        rank: this rank's place.
    """

    name: str
    size: int
    rank: int

    @staticmethod
    def of(group: dist.ProcessGroup) -> Members:
        """Return the constants of a process group."""
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
    """Start to sum `x` over the ranks. `x` is given away: the sum may be made in its place.

    Not so where a dispatch mode sees operators, as that of selective recompute does: it may have kept `x`.
    """
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode(include_infra_modes=False):
        return Started(_functional.start_sum(x, ranks.name), None)
    ran_on(x.device)
    x = x.contiguous()
    return Started(x, dist.all_reduce(x, group=ranks.group, async_op=True))


def start_broadcast(x: torch.Tensor, source: int, ranks: Members) -> Started:
    """Start to send the `x` of rank number `source` into the `x` of the others; that of `source` is only read."""
    ran_on(x.device)
    return Started(x, dist.broadcast(x.data, group=ranks.group, group_src=source, async_op=True))


def start_sum_at(x: torch.Tensor, target: int, ranks: Members) -> Started:
    """Start to sum `x` over the ranks, for rank number `target` alone. `x` is given away; elsewhere it is undefined."""
    ran_on(x.device)
    x = x.contiguous()
    return Started(x, dist.reduce(x, group=ranks.group, group_dst=target, async_op=True))


def start_scatter_sum(x: torch.Tensor, dim: int, ranks: Members) -> Started:
    """Start to sum `x` over the ranks and keep this rank's of equal parts along `dim`."""
    if torch.compiler.is_compiling():
        return Started(_functional.start_scatter_sum(x, dim, ranks.name), None)
    parts = x.contiguous() if dim == 0 else torch.stack(x.chunk(ranks.size, dim)).flatten(0, 1)
    out = parts.new_empty(parts.shape[0] // ranks.size, *parts.shape[1:])
    ran_on(x.device)
    return Started(out, _scatter_sum(out, parts, group=ranks.group, async_op=True))


def start_shift(x: torch.Tensor, ranks: Members, steps: int = 1) -> Started:
    """Start to send `x` to the rank `steps` after this one around the ring, and to receive that of the one before.

    Args:
        x: a tensor of the same shape on all ranks, unchanged until the result has been waited for.
        ranks: the ranks.
        steps: may be negative. Only these neighbours exchange anything.
    """
    rows = x.shape[0]
    to, source = (ranks.rank + steps) % ranks.size, (ranks.rank - steps) % ranks.size
    sent = [rows if peer == to else 0 for peer in range(ranks.size)]
    received = [rows if peer == source else 0 for peer in range(ranks.size)]
    if torch.compiler.is_compiling() or is_in_torch_dispatch_mode(include_infra_modes=False):
        return Started(_functional.start_swap_rows(x, received, sent, ranks.name), None)
    ran_on(x.device)
    out, x = torch.empty_like(x, memory_format=torch.contiguous_format), x.contiguous()
    return Started(out, dist.all_to_all_single(out, x, received, sent, group=ranks.group, async_op=True))


def gathered(x: torch.Tensor, dim: int, ranks: Members) -> torch.Tensor:
    """The parts `x` of all ranks, of equal size, put together along `dim`."""
    return _functional.gather(x, dim, ranks.name)
