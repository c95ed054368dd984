"""torch's functional collectives by the name of a group, traceable; the one file that knows their operators.

The operators themselves, not `torch.distributed._functional_collectives`: while a graph is traced, its functions wait
for what they have started, and nothing runs beside it.
"""

from __future__ import annotations

import torch
from torch.distributed.distributed_c10d import _get_group_size_by_name as _size

from cai_mesh.comm._exit import ran_on

_ops = torch.ops._c10d_functional


def wait(x: torch.Tensor) -> torch.Tensor:
    """`x` once what was started has been done."""
    return _ops.wait_tensor(x)


def start_sum(x: torch.Tensor, name: str) -> torch.Tensor:
    """A new tensor for the sum over the ranks, to be waited for."""
    ran_on(x.device)
    return _ops.all_reduce(x.contiguous(), "sum", name)


def sum_over(x: torch.Tensor, name: str) -> torch.Tensor:
    """The sum over the ranks."""
    return wait(start_sum(x, name))


def gather(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """The parts of all ranks, of equal size, put together along `dim`.

    Where all dims before it have one element, as a batch of one sequence has, nothing is copied.
    """
    ran_on(x.device)
    dim %= x.dim()
    parts = wait(_ops.all_gather_into_tensor(x.contiguous(), _size(name), name))
    if dim == 0:
        return parts
    return parts.unflatten(0, (_size(name), x.shape[0])).movedim(0, dim).flatten(dim, dim + 1)


def start_scatter_sum(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the ranks, to be waited for."""
    ran_on(x.device)
    size = _size(name)
    parts = x if dim % x.dim() == 0 else torch.cat(x.chunk(size, dim))
    return _ops.reduce_scatter_tensor(parts.contiguous(), "sum", size, name)


def scatter_sum(x: torch.Tensor, dim: int, name: str) -> torch.Tensor:
    """This rank's part along `dim` of the sum over the ranks."""
    return wait(start_scatter_sum(x, dim, name))


def swap_rows(
    x: torch.Tensor, out_splits: list[int] | None, in_splits: list[int] | None, name: str
) -> torch.Tensor:
    """Rows (dim 0) to every rank and from every rank."""
    ran_on(x.device)
    size = _size(name)
    equal = [x.shape[0] // size] * size
    return wait(_ops.all_to_all_single(x.contiguous(), out_splits or equal, in_splits or equal, name))
