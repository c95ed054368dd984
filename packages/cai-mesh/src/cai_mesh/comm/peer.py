"""All-gather by the GPUs' copy engines: each rank reads the others' shards out of their memory.

A collective kernel holds some of the multiprocessors the model computes on; copies between GPUs of one host need
none. The shards are put in symmetric memory (which every rank of the group can address), a barrier says that all are
there, and each rank copies the parts it lacks.
"""

from __future__ import annotations

from collections.abc import Iterable

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
        nbytes: of the largest shard.
        device: this rank's GPU.

    Collective. Raises `PlanError` where the GPUs cannot address each other.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device):
        self._rank, self._size, self._turn = group.rank(), group.size(), 0
        self._slots = symmetric.empty(SLOTS, nbytes, dtype=torch.uint8, device=device)
        try:
            self._handle = symmetric.rendezvous(self._slots, group)
            peers = range(self._size)
            self._peers = [self._handle.get_buffer(p, (SLOTS, nbytes), torch.uint8) for p in peers]
        except RuntimeError as error:
            raise PlanError(
                "copy engines cannot gather over these ranks",
                cause=str(error).splitlines()[0],
                expected="GPUs of one host with peer access",
                fix="leave copy_engines out",
            ) from error

    @torch.no_grad()
    def __call__(self, unsharded: torch.Tensor, shard: torch.Tensor) -> None:
        """Gather every rank's `shard` [n], of any dtype, into `unsharded` [ranks * n] on the current stream."""
        slot, self._turn = self._turn % SLOTS, self._turn + 1
        parts = unsharded.view(self._size, -1)
        nbytes = parts.shape[1] * unsharded.element_size()
        mine = self._slots[slot, :nbytes].view(unsharded.dtype)
        mine.copy_(shard, non_blocking=True)
        self._handle.barrier(channel=0)
        for step in range(self._size):
            peer = (self._rank + step) % self._size
            parts[peer].copy_(self._peers[peer][slot, :nbytes].view(unsharded.dtype), non_blocking=True)


class PeerGathers:
    """A `PeerGather` for every group that gathers, where copy engines are wanted.

    Args:
        needs: (group, bytes of a rank's shard) of everything that will be gathered, in the same order on all ranks.
        device: this rank's GPU.
        wanted: False makes none.

    Collective. Raises as `PeerGather` does.
    """

    def __init__(
        self, needs: Iterable[tuple[dist.ProcessGroup | None, int]], device: torch.device, *, wanted: bool
    ):
        largest: dict[dist.ProcessGroup, int] = {}
        for group, nbytes in needs:
            if wanted and group is not None:
                largest[group] = max(largest.get(group, 0), nbytes)
        self._of = {group: PeerGather(group, nbytes, device) for group, nbytes in largest.items()}

    def of(self, group: dist.ProcessGroup | None) -> PeerGather | None:
        """That of a group; None where a collective gathers."""
        return None if group is None else self._of.get(group)
