"""Matrix products with their communication beside them: while one part of the rows is multiplied, others travel.

The decomposition of Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large Deep
Learning Models" (ASPLOS 2023), known as asynchronous tensor parallelism. Rows are tokens. A rank holds one run of them,
the `p` ranks together all of them.

- `gather_matmul`: a rank multiplies its own rows while those of the others arrive, then each of these.
- `matmul_scatter`: it multiplies the rows of the others first and sends what it got; its own rows come last.
- `start_scatter`: a sum that travels beside whatever is issued before it is finished;
  `scatter_beside_weight_gradient`: beside the gradient of a weight.

On a GPU the transfers are made by copy engines (`cai_mesh.comm.PeerGather`, `PeerReduce`), which take no
multiprocessor; on a CPU the same steps run one after the other, with collectives. None has derivatives: rules of linear
layers call them. Those that graphs need are operators.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from cai_mesh.comm import PeerGather, PeerReduce, SideStream, all_gather_into, reduce_scatter_into
from cai_mesh.gradients import add_weight_gradient
from cai_mesh.operators import operator


@dataclass
class Partners:
    """The peer memory that the operators of one group use on a GPU.

    Args:
        group: the ranks.
        device: this rank's GPU.
    """

    group: dist.ProcessGroup
    device: torch.device
    waiting: bool = field(default=False, init=False)
    """Whether a sum was started and not finished."""

    def __post_init__(self) -> None:
        self.stream = SideStream(self.device)
        self._room: dict[str, int] = {}

    def gather(self, nbytes: int) -> PeerGather:
        """A gather for parts of so many bytes."""
        if self._grown("gather", nbytes):
            self._gather = PeerGather(self.group, nbytes, self.device)
        return self._gather

    def reduce(self, nbytes: int) -> PeerReduce:
        """A sum for contributions of so many bytes to a rank."""
        if self._grown("reduce", nbytes):
            self._reduce = PeerReduce(self.group, nbytes, self.device, whole=True)
        return self._reduce

    def _grown(self, name: str, nbytes: int) -> bool:
        """Whether there is no room for so much, alike on all ranks; then nobody reads any more what goes away."""
        if self._room.get(name, 0) >= nbytes:
            return False
        torch.cuda.synchronize(self.device)
        dist.barrier(self.group, device_ids=[self.device.index])
        self._room[name] = nbytes
        return True


_partners: weakref.WeakKeyDictionary[dist.ProcessGroup, Partners] = weakref.WeakKeyDictionary()
"""An operator is told the name of a group, no object."""


def _of(group: dist.ProcessGroup, device: torch.device) -> Partners:
    if group not in _partners:
        _partners[group] = Partners(group, device)
    return _partners[group]


def check_partners(group: dist.ProcessGroup) -> None:
    """Raise `PlanError` where the GPUs of a group cannot address each other. Collective on GPUs, nothing elsewhere."""
    if "nccl" in dist.get_backend(group):  # also beside another, for CPU tensors
        _of(group, torch.device("cuda", torch.cuda.current_device())).gather(1)


def _whole(part: torch.Tensor, weight: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    rows = part.shape[0] * _resolve_process_group(group).size()
    return part.new_empty(rows, weight.shape[1]), part.new_empty(rows, part.shape[1])


def _part(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    return x.new_empty(x.shape[0] // _resolve_process_group(group).size(), weight.shape[1])


@operator("cai_tensor_parallel::gather_matmul", fake=_whole)
def gather_matmul(part: torch.Tensor, weight: torch.Tensor, group: str) -> tuple[torch.Tensor, torch.Tensor]:
    """part [n, k] of every rank and weight [k, m] -> the rows of all ranks times it [p n, m], these rows [p n, k].

    Args:
        group: name of the ranks.
    """
    ranks = _resolve_process_group(group)
    p, local_rank, n = ranks.size(), ranks.rank(), part.shape[0]
    part = part.contiguous()
    full = part.new_empty(p * n, part.shape[1])
    product = part.new_empty(p * n, weight.shape[1])
    rows, products = full.view(p, n, -1), product.view(p, n, -1)
    if not part.is_cuda:
        all_gather_into(full, part, ranks)
        for rank in range(p):
            torch.mm(part if rank == local_rank else rows[rank], weight, out=products[rank])
        return product, full
    partners = _of(ranks, part.device)
    gather = partners.gather(part.numel() * part.element_size())
    with partners.stream.after_compute():
        arrived = [(rank, partners.stream.mark()) for rank in gather.parts(full.view(-1), part)]
    torch.mm(part, weight, out=products[local_rank])
    for rank, mark in arrived:
        mark.wait()
        if rank != local_rank:
            torch.mm(rows[rank], weight, out=products[rank])
    return product, full


@operator("cai_tensor_parallel::matmul_scatter", fake=_part)
def matmul_scatter(x: torch.Tensor, weight: torch.Tensor, group: str) -> torch.Tensor:
    """x [p n, k] and weight [k, m], of which each rank has a part of k -> this rank's rows of the sum [n, m].

    Args:
        group: name of the ranks.
    """
    ranks = _resolve_process_group(group)
    rows = x.contiguous().view(ranks.size(), -1, x.shape[1])
    if not x.is_cuda:
        product = torch.cat([torch.mm(block, weight) for block in rows])
        return _summed(product, ranks)
    product = x.new_empty(*rows.shape[:2], weight.shape[1])
    return _exchanged(product, ranks, lambda rank: torch.mm(rows[rank], weight, out=product[rank]))()


def start_scatter(x: torch.Tensor, ranks: dist.ProcessGroup) -> Callable[[], torch.Tensor]:
    """Start to sum x [p n, m] over the ranks; returns what finishes it and gives this rank's rows [n, m].

    For eager code: a graph does not know that x is still read.
    """
    if not x.is_cuda:
        return lambda: _summed(x, ranks)
    return _exchanged(x.contiguous().view(ranks.size(), -1, x.shape[1]), ranks, lambda rank: None)


def _own_rows(
    x: torch.Tensor,
    token: torch.Tensor,
    grad: torch.Tensor,
    operands: list[torch.Tensor],
    key: str,
    group: str,
) -> torch.Tensor:
    return x.new_empty(x.shape[0] // _resolve_process_group(group).size(), x.shape[1])


@operator("cai_tensor_parallel::scatter_beside_weight_gradient", fake=_own_rows, mutates=("token",))
def scatter_beside_weight_gradient(
    x: torch.Tensor,
    token: torch.Tensor,
    grad: torch.Tensor,
    operands: list[torch.Tensor],
    key: str,
    group: str,
) -> torch.Tensor:
    """This rank's rows [n, m] of the sum of x [p n, m]; while it travels, a weight's gradient goes into its chunk.

    Args:
        token, grad, operands, key: those of `cai_mesh::weight_gradient`.
        group: name of the ranks.
    """
    finish = start_scatter(x, _resolve_process_group(group))
    try:
        add_weight_gradient(grad, operands, key)
    finally:
        part = finish()
    return part


def _exchanged(
    parts: torch.Tensor, ranks: dist.ProcessGroup, make: Callable[[int], object]
) -> Callable[[], torch.Tensor]:
    """Give every rank its part of parts [p, n, m], once `make` has issued what makes it; returns what adds them up."""
    partners = _of(ranks, parts.device)
    if partners.waiting:
        raise RuntimeError(
            "a sum over tensor-parallel ranks began before another was finished; please report this"
        )
    reduce = partners.reduce(parts[0].numel() * parts.element_size())
    for rank in reduce.others:
        make(rank)
        with partners.stream.after_compute():
            reduce.give(parts[rank], rank)
    make(ranks.rank())
    local_part = parts[ranks.rank()]
    with partners.stream.work():
        arrived = reduce.meet(local_part)
    done, partners.waiting = partners.stream.mark(), True

    def finish() -> torch.Tensor:
        partners.waiting = False
        done.wait()
        total = torch.add(local_part, arrived[0].view_as(local_part))
        for contribution in arrived[1:]:
            total.add_(contribution.view_as(local_part))
        return total

    return finish


def _summed(x: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    total = x.new_empty(x.shape[0] // ranks.size(), *x.shape[1:])
    reduce_scatter_into(total, x, ranks)
    return total


@dataclass(frozen=True)
class Scattering:
    """A `TensorHandle` of this rank's rows of a sum that travels.

    Args:
        finish: the function that `start_scatter` returned.
        shape: the shape of what `wait` returns.
    """

    finish: Callable[[], torch.Tensor]
    shape: tuple[int, ...]

    def wait(self) -> torch.Tensor:
        return self.finish().view(self.shape)
