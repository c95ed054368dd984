"""Eager collectives in place, with handles. The one file that knows torch's names for them.

`group=None` is a world of one: every function is then a copy or nothing.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist

from cai_mesh.comm._exit import pause_at_exit, ran_on
from cai_mesh.comm.handles import CommHandle, Done

Op = Literal["sum", "max", "min", "avg"]
_OPS = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "avg": dist.ReduceOp.AVG,
}

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_to_all = getattr(dist, "all_to_all_single")


def _handle(work: dist.Work | None) -> CommHandle:
    return work if work is not None else Done()  # type: ignore[return-value]


def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None, *, op: Op = "sum", async_op: bool = False
) -> CommHandle:
    """Reduce `tensor` over the group, in place."""
    if group is None:
        return Done()
    if op == "avg" and dist.get_backend(group) == "gloo":
        tensor.div_(group.size())
        op = "sum"
    ran_on(tensor.device)
    return _handle(dist.all_reduce(tensor, _OPS[op], group=group, async_op=async_op))


def all_gather_into(
    out: torch.Tensor, shard: torch.Tensor, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> CommHandle:
    """Gather every rank's `shard` [n, ...] into `out` [world * n, ...]. `shard` may be this rank's part of `out`."""
    if group is None:
        if out.data_ptr() != shard.data_ptr():
            out.copy_(shard)
        return Done()
    ran_on(shard.device)
    return _handle(_all_gather(out, shard, group=group, async_op=async_op))


def reduce_scatter_into(
    shard: torch.Tensor,
    full: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    op: Op = "sum",
    async_op: bool = False,
) -> CommHandle:
    """Reduce `full` [world * n, ...] over the group and keep this rank's part in `shard` [n, ...]."""
    if group is None:
        if shard.data_ptr() != full.data_ptr():
            shard.copy_(full)
        return Done()
    if op == "avg" and dist.get_backend(group) == "gloo":
        full.div_(group.size())
        op = "sum"
    ran_on(full.device)
    return _handle(_reduce_scatter(shard, full, op=_OPS[op], group=group, async_op=async_op))


def all_to_all_into(
    out: torch.Tensor,
    inp: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
    async_op: bool = False,
) -> CommHandle:
    """Send rows of `inp` to every rank and receive theirs in `out`; equal parts unless splits are given."""
    if group is None:
        out.copy_(inp)
        return Done()
    ran_on(inp.device)
    return _handle(_all_to_all(out, inp, out_splits, in_splits, group=group, async_op=async_op))


def broadcast(
    tensor: torch.Tensor, src: int, group: dist.ProcessGroup | None, *, async_op: bool = False
) -> CommHandle:
    """Copy `tensor` of the rank with index `src` in the group to all, in place."""
    if group is None:
        return Done()
    ran_on(tensor.device)
    return _handle(dist.broadcast(tensor, group=group, group_src=src, async_op=async_op))


def all_gather_object(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Every rank's picklable `value`, in rank order. For control data between the ranks of one job."""
    if group is None:
        return [value]
    if dist.get_backend(group) != "nccl":
        pause_at_exit()
    values: list[Any] = [None] * group.size()
    dist.all_gather_object(values, value, group=group)
    return values
