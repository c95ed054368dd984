"""torch's functional collectives by the name of a group, traceable; the one file that knows their names.

Sums in graphs are the operators themselves: while a graph is traced, torch's functions wait for what they have started,
and nothing runs beside it.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives as funcol
from torch.distributed.distributed_c10d import _get_group_size_by_name as _size

from cai_mesh.comm._exit import ran_on

_gather_single = getattr(funcol, "all_gather_single", None) or funcol.all_gather_tensor
_scatter_single = getattr(funcol, "reduce_scatter_single", None) or funcol.reduce_scatter_tensor
_ops = torch.ops._c10d_functional

wait = funcol.wait_tensor


def start_sum(x: torch.Tensor, name: str) -> torch.Tensor:
    """A new tensor for the sum over the ranks, to be waited for."""
    ran_on(x.device)
    if torch.compiler.is_compiling():
        return _ops.all_reduce(x.contiguous(), "sum", name)
    return funcol.all_reduce(x, "sum", name)


def sum_over(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sum over the ranks."""
    return wait(start_sum(x, name))


def gather(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """The parts of all ranks, of equal size, put together along `dim`.

    torch puts parts together along another dim than 0 by code that compilers of torch 2.11 do not follow; where all
    dims before it have one element, as a batch of one sequence has, nothing is copied here.
    """
    ran_on(x.device)
    dim %= x.dim()
    if dim == 0 or not x.shape[0]:
        return wait(_gather_single(x.contiguous(), dim, name))
    parts = wait(_gather_single(x.contiguous(), 0, name)).unflatten(0, (-1, x.shape[0]))
    return parts.movedim(0, dim).flatten(dim, dim + 1)


def start_scatter_sum(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the ranks, to be waited for."""
    ran_on(x.device)
    if not torch.compiler.is_compiling():
        return _scatter_single(x.contiguous(), "sum", dim, name)
    parts = x if dim % x.dim() == 0 else torch.cat(x.chunk(_size(name), dim))
    return _ops.reduce_scatter_tensor(parts.contiguous(), "sum", _size(name), name)


def scatter_sum(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    return wait(start_scatter_sum(x, dim, name))


def start_swap_rows(
    x: torch.Tensor, out_splits: list[int] | None, in_splits: list[int] | None, name: str
) -> torch.Tensor:
    """Rows (dim 0) to every rank and from every rank, to be waited for."""
    ran_on(x.device)
    return funcol.all_to_all_single(x.contiguous(), out_splits, in_splits, name)


def swap_rows(
    x: torch.Tensor, out_splits: list[int] | None, in_splits: list[int] | None, name: str
) -> torch.Tensor:
    """Rows (dim 0) to every rank and from every rank."""
    return wait(start_swap_rows(x, out_splits, in_splits, name))
