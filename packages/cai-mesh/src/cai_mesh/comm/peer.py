"""All-gather and reduce-scatter by the GPUs' copy engines, in memory that every rank of a group can address.

A collective kernel holds some of the multiprocessors the model computes on; copies between GPUs of one host need none.
To gather, shards are put in symmetric memory, a barrier says that all are there, and each rank copies the parts it
lacks. To reduce, each rank copies its contributions into the others' memory, and after the barrier adds what it was
given: one short kernel instead of one as long as the transfer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric

from cai_mesh.errors import PlanError

SLOTS = 2
"""A rank that has passed the barrier of one gather knows that all have finished the one before it."""


def check_device(device: torch.device, *, wanted: bool) -> None:
    """Raise `PlanError` where copy engines are wanted off CUDA."""
    if wanted and device.type != "cuda":
        raise PlanError(
            "copy engines are a GPU's", got=device, expected="a CUDA device", fix="leave copy_engines out"
        )


class PeerGather:
    """Gathers shards over the GPUs of one host without occupying a multiprocessor.

    Every rank of the group makes the same gathers in the same order, all on one stream.

    Args:
        group: ranks that share a chunk, each with a GPU that can address the others'.
        nbytes: bytes of the largest shard.
        device: this rank's GPU.

    Collective. Raises `PlanError` where the GPUs cannot address each other.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device):
        self._rank, self._size, self._turn = group.rank(), group.size(), 0
        self._handle, self._slots, self._peers = _meet(group, (SLOTS, nbytes), device)

    def __call__(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather every rank's `shard` [n], of any dtype, into `unsharded` [ranks * n] on the current stream."""
        for _ in self.parts(unsharded, shard):
            pass

    @torch.no_grad()
    def parts(self, unsharded: torch.Tensor, shard: torch.Tensor) -> Iterator[int]:
        """The same, part by part: yields the rank whose part has been issued, this one's last."""
        slot, self._turn = self._turn % SLOTS, self._turn + 1
        parts = unsharded.view(self._size, -1)
        nbytes = parts.shape[1] * unsharded.element_size()
        mine = self._slots[slot, :nbytes].view(unsharded.dtype)
        mine.copy_(shard.view(-1), non_blocking=True)
        self._handle.barrier(channel=0)
        for step in range(1, self._size + 1):
            peer = (self._rank + step) % self._size
            parts[peer].copy_(self._peers[peer][slot, :nbytes].view(unsharded.dtype), non_blocking=True)
            yield peer


PIECE_BYTES = 2**27
"""Bytes of the contributions to a rank that travel at once: enough for the links, little memory for many ranks."""
ALIGNMENT = 512
"""Bytes at which a contribution begins, a multiple of every element's size."""


class PeerReduce:
    """Adds up over the GPUs of one host; a multiprocessor is used only to add.

    Every rank of the group makes the same reductions in the same order, all on one stream. Contributions travel in
    pieces through two slots: who has passed the barrier of one piece knows that all have added the one before it.

    Args:
        group: ranks that share a chunk, each with a GPU that can address the others'.
        nbytes: bytes of the largest shard of what is reduced.
        device: this rank's GPU.
        whole: there is room for whole contributions, for who calls `give` and `meet`.

    Collective. Raises `PlanError` where the GPUs cannot address each other.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device, *, whole: bool = False):
        self._rank, self._size, self._turn = group.rank(), group.size(), 0
        piece = nbytes * self._size if whole else PIECE_BYTES // (self._size - 1) // ALIGNMENT * ALIGNMENT
        self._nbytes = -(-min(nbytes, piece) // ALIGNMENT) * ALIGNMENT
        shape = (SLOTS, self._size - 1, self._nbytes)
        self._handle, self._slots, self._peers = _meet(group, shape, device)

    @torch.no_grad()
    def __call__(self, shard: torch.Tensor, full: torch.Tensor) -> None:
        """Sum this rank's part of `full` [ranks * n] over ranks into `shard` [n], on the current stream."""
        parts, largest = full.view(self._size, -1), self._nbytes // full.element_size()
        for start in range(0, parts.shape[1], largest):
            piece = slice(start, min(start + largest, parts.shape[1]))
            for peer in self.others:
                self.give(parts[peer, piece], peer)
            arrived = self.meet(shard[piece])
            torch.add(arrived[0], parts[self._rank, piece], out=shard[piece])
            for contribution in arrived[1:]:
                shard[piece].add_(contribution)

    @property
    def others(self) -> list[int]:
        """The other ranks, in the order in which to give to them: at any time no two give to the same."""
        return [(self._rank + step) % self._size for step in range(1, self._size)]

    def give(self, contribution: torch.Tensor, peer: int) -> None:
        """Copy a contribution into the memory of rank number `peer`, on the current stream."""
        nbytes = contribution.numel() * contribution.element_size()
        place = self._peers[peer][self._turn % SLOTS, (peer - self._rank) % self._size - 1, :nbytes]
        place.view(contribution.dtype).copy_(contribution.reshape(-1), non_blocking=True)

    def meet(self, like: torch.Tensor) -> torch.Tensor:
        """Wait on the current stream until all have given: their contributions, [ranks - 1, elements of `like`].

        They stay until this rank passes the barrier after the next: read them before the next `meet` is issued.
        """
        slot, self._turn = self._turn % SLOTS, self._turn + 1
        self._handle.barrier(channel=0)
        return self._slots[slot, :, : like.numel() * like.element_size()].view(like.dtype)


def _meet(
    group: dist.ProcessGroup, shape: tuple[int, ...], device: torch.device
) -> tuple[Any, torch.Tensor, list[torch.Tensor]]:
    """Bytes of this shape in symmetric memory: the handle, this rank's, everybody's."""
    slots = symmetric.empty(*shape, dtype=torch.uint8, device=device)
    try:
        handle = symmetric.rendezvous(slots, group)
        return handle, slots, [handle.get_buffer(peer, shape, torch.uint8) for peer in range(group.size())]
    except RuntimeError as error:
        raise PlanError(
            "copy engines cannot work over these ranks",
            cause=str(error).splitlines()[0],
            expected="GPUs of one host with peer access",
            fix="leave copy_engines or overlap out",
        ) from error


P = TypeVar("P", PeerGather, PeerReduce)


class Peers(Generic[P]):
    """A `PeerGather` or a `PeerReduce` for every group that needs one, where copy engines are wanted.

    Args:
        kind: the class, one of the two.
        needs: (group, bytes of a rank's shard) of everything that will travel, in the same order on all ranks.
        device: this rank's GPU.
        wanted: False makes none.

    Collective. Raises as `kind` does.
    """

    def __init__(
        self,
        kind: type[P],
        needs: Iterable[tuple[dist.ProcessGroup | None, int]],
        device: torch.device,
        *,
        wanted: bool,
    ):
        largest: dict[dist.ProcessGroup, int] = {}
        for group, nbytes in needs:
            if wanted and group is not None:
                largest[group] = max(largest.get(group, 0), nbytes)
        self._of = {group: kind(group, nbytes, device) for group, nbytes in largest.items()}

    def of(self, group: dist.ProcessGroup | None) -> P | None:
        """That of a group; None where collectives do it."""
        return None if group is None else self._of.get(group)
