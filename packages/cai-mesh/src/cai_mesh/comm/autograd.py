"""Differentiable collectives as forward/backward pairs, traceable by `torch.compile(fullgraph=True)`.

Every function takes plain tensors and a process group; `group=None` is a world of one. The conjugate pairs are the
f and g operators of Megatron-LM (Shoeybi et al., arXiv:1909.08053; Korthikanti et al., arXiv:2205.05198).
Sizes along the gathered or scattered dimension must be equal on all ranks.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cai_mesh.comm._functional import gather, scatter_sum, sum_over, swap_rows
from cai_mesh.errors import LayoutError


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        ctx.name = name
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return sum_over(grad, ctx.name), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, name):
        return sum_over(x, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad, None


class _Gather(torch.autograd.Function):
    """All-gather forward; backward slices (replicated consumers) or reduce-scatters (consumers that differ)."""

    @staticmethod
    def forward(ctx, x, dim, name, rank, size, sum_grads):
        ctx.args = (dim, name, rank, size, sum_grads)
        return gather(x, dim, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dim, name, rank, size, sum_grads = ctx.args
        grad = scatter_sum(grad, dim, name) if sum_grads else grad.chunk(size, dim)[rank].contiguous()
        return grad, None, None, None, None, None


class _Scatter(torch.autograd.Function):
    """Slice (replicated input) or reduce-scatter (partial input) forward; all-gather backward."""

    @staticmethod
    def forward(ctx, x, dim, name, rank, size, sum_input):
        ctx.args = (dim, name)
        return scatter_sum(x, dim, name) if sum_input else x.chunk(size, dim)[rank].contiguous()

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        dim, name = ctx.args
        return gather(grad, dim, name), None, None, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, out_splits, in_splits, name):
        ctx.args = (in_splits, out_splits, name)
        return swap_rows(x, out_splits, in_splits, name)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return swap_rows(grad, *ctx.args), None, None, None


def _divides(x: torch.Tensor, dim: int, group: dist.ProcessGroup, what: str) -> None:
    if x.shape[dim] % group.size():
        raise LayoutError(
            f"{what} needs equal parts",
            got=f"size {x.shape[dim]} in dim {dim}",
            expected=f"a multiple of {group.size()}",
        )


def copy_to(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Identity forward, all-reduce backward: enter a region where ranks compute different parts from `x`."""
    return x if group is None else _CopyTo.apply(x, group.group_name)


def reduce_from(x: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-reduce forward, identity backward: leave a region with every rank's partial sum."""
    return x if group is None else _ReduceFrom.apply(x, group.group_name)


def gather_from(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather along `dim` forward, this rank's slice backward: the result is used alike on all ranks."""
    if group is None:
        return x
    return _Gather.apply(x, dim, group.group_name, group.rank(), group.size(), False)


def scatter_to(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """This rank's slice of a replicated `x` along `dim` forward, all-gather backward."""
    if group is None:
        return x
    _divides(x, dim, group, "scatter_to")
    return _Scatter.apply(x, dim, group.group_name, group.rank(), group.size(), False)


def all_gather(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """All-gather along `dim` forward, reduce-scatter backward: every rank uses the full tensor in its own way."""
    if group is None:
        return x
    return _Gather.apply(x, dim, group.group_name, group.rank(), group.size(), True)


def reduce_scatter(x: torch.Tensor, dim: int, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Reduce-scatter partial sums along `dim` forward, all-gather backward."""
    if group is None:
        return x
    _divides(x, dim, group, "reduce_scatter")
    return _Scatter.apply(x, dim, group.group_name, group.rank(), group.size(), True)


def all_to_all(
    x: torch.Tensor,
    group: dist.ProcessGroup | None,
    *,
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
) -> torch.Tensor:
    """Exchange rows (dim 0) with every rank, equal parts unless splits are given; the reverse exchange backward."""
    if group is None:
        return x
    if in_splits is None:
        _divides(x, 0, group, "all_to_all")
    return _AllToAll.apply(x, out_splits, in_splits, group.group_name)


def shift(x: torch.Tensor, group: dist.ProcessGroup | None, steps: int = 1) -> torch.Tensor:
    """The `x` of the rank `steps` before this one around the ring of the group; the reverse shift backward.

    Args:
        x: a tensor of the same shape on all ranks.
        steps: may be negative. Rank r sends to rank (r + steps) mod size.

    Only neighbours exchange anything: the all-to-all behind it has one part that is not empty.
    """
    if group is None or steps % group.size() == 0:
        return x
    size, rank, count = group.size(), group.rank(), x.numel()
    to, source = (rank + steps) % size, (rank - steps) % size
    sent = [count if peer == to else 0 for peer in range(size)]
    received = [count if peer == source else 0 for peer in range(size)]
    return _AllToAll.apply(x.reshape(-1), received, sent, group.group_name).view(x.shape)


def swap_shards(
    x: torch.Tensor, gather_dim: int, scatter_dim: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Turn shards along `gather_dim` into shards along `scatter_dim`, in one all-to-all; the reverse swap backward.

    Ulysses attention goes from sequence to heads and back so (Jacobs et al., arXiv:2309.14509).

    Args:
        x: [..., G/p, ..., S, ...], this rank's shard along `gather_dim`, full along `scatter_dim`.
        gather_dim, scatter_dim: two different dims of x; negative ones count from the end.
        group: the p ranks, in the order of the shards.

    Returns [..., G, ..., S/p, ...]. Raises `LayoutError` where S does not divide, or for the same dim twice.
    """
    if gather_dim % x.dim() == scatter_dim % x.dim():
        raise LayoutError("shards are swapped between two dims", got=f"dim {gather_dim} twice")
    if group is None:
        return x
    _divides(x, scatter_dim, group, "swap_shards")
    parts = torch.stack(x.chunk(group.size(), scatter_dim))
    received = _AllToAll.apply(parts, None, None, group.group_name)
    return torch.cat(received.unbind(0), gather_dim)
