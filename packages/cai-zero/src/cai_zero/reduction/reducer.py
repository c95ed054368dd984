"""Reduction of gradients while backward runs, the same for every stage: which chunk, when, and over whom.

Reductions go through the chunks in an order that all ranks share, whatever a rank has used: a chunk is reduced once it
and all before it are complete, the rest when the backward ends. They run on a stream of their own, and only so many at
a time, which bounds the memory of gradients.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from cai_mesh.comm import PeerReduce, SideStream, all_reduce
from cai_mesh.gradients import GradBuffer
from cai_mesh.layout import ReduceSpec
from cai_mesh.protocols import CommHandle
from cai_zero.reduction.compression import Compression, reduce_gradients
from cai_zero.reduction.ranks import DataRanks

Key = TypeVar("Key", bound=Hashable)


@dataclass(eq=False)
class Reducible:
    """One chunk's gradients on their way from an unsharded chunk here to this rank's shard of their sum.

    Args:
        buffer: the buffer in which they accumulate.
        spec, ranks: the ranks over which they are summed.
        keep: takes this rank's shard of the sum, written by the current stream, for good.
        residual: [chunk.numel], what compression has taken from this rank's gradients and not yet sent.
        peer: sums by copy engines instead of collectives.
    """

    buffer: GradBuffer
    spec: ReduceSpec
    ranks: DataRanks
    keep: Callable[[torch.Tensor], None]
    residual: torch.Tensor | None = None
    peer: PeerReduce | None = None

    @property
    def tied(self) -> bool:
        """Whether another stage holds the parameters too: it may lag behind, so these wait for the step's end."""
        return self.spec.tied is not None


def reduce_chunk(
    full: torch.Tensor,
    ranks: DataRanks,
    spec: ReduceSpec,
    compression: Compression,
    residual: torch.Tensor | None,
    peer: PeerReduce | None,
) -> torch.Tensor:
    """Reduce the gradients of an unsharded chunk and return this rank's shard (`full` itself where it is not divided).

    The order is that of `ReduceSpec`: holders of a tied parameter, then axes with partial gradients, then the data
    axes; then the divisor. Only the sum over the ranks that share the chunk is compressed. `full` [numel] is
    overwritten, `residual` [numel] updated.
    """
    if spec.tied is not None:
        all_reduce(full, spec.tied)
    all_reduce(full, ranks.partial)
    shard = full
    # NCCL divides on the way; elsewhere, and where quantised, a division after the sum loses least
    average = "avg" if full.is_cuda and ranks.divisor == ranks.count else "sum"
    if ranks.shard is not None:
        shard = reduce_gradients(compression, full, ranks.shard, residual, op=average, peer=peer)
    all_reduce(shard, ranks.copies, op=average)
    if average == "sum" and ranks.divisor != 1.0:
        shard.div_(ranks.divisor)
    return shard


class GradReducer(Generic[Key]):
    """Reduces what belongs to keys (units, or chunks) as they become complete.

    Args:
        device: the device of the gradients.
        compression: the compression of gradients in flight.
        ahead: the number of reductions that may be under way while the next buffer fills.

    Attributes:
        order: the keys, in the order in which all ranks reduce them.
        silent: whether backwards only accumulate.
    """

    def __init__(self, device: torch.device, compression: Compression, *, ahead: int = 1):
        self._stream, self._compression, self._ahead = SideStream(device), compression, ahead
        self._under_way: deque[tuple[CommHandle, GradBuffer]] = deque()
        self._of: Mapping[Key, Sequence[Reducible]] = {}
        self.order: list[Key] = []
        self.silent = False
        self._next, self._ready = 0, set[Key]()  # of the backward under way

    def take(self, of: Mapping[Key, Sequence[Reducible]], order: Sequence[Key]) -> None:
        """Take what is to be reduced, by key, and the keys in order."""
        self._of, self.order = of, list(order)

    # -- a backward ----------------------------------------------------------------------------------------------

    def ready(self, key: Key) -> None:
        """The gradients of `key` in this backward are complete, if there are any: reduce as far as the order allows."""
        self._ready.add(key)
        while not self.silent and self._next < len(self.order) and self.order[self._next] in self._ready:
            self.reduce(self.order[self._next])
            self._next += 1

    def is_ready(self, key: Key) -> bool:
        """Whether `key` has been ready in this backward."""
        return key in self._ready

    def is_reduced(self, key: Key) -> bool:
        """Whether the turn of `key` in this backward has passed."""
        return not self.silent and key in self.order[: self._next]

    def end_backward(self, again: Sequence[Key] = ()) -> None:
        """Reduce the rest of the order, also what this rank did not use: others may have. Then `again`, once more."""
        if not self.silent:
            for key in [*self.order[self._next :], *again]:
                self.reduce(key)
        self.reset()

    def reset(self) -> None:
        """Forget the backward, which may have raised, and let the compute stream wait for all reductions."""
        self._next = 0
        self._ready.clear()
        self.join()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside accumulate unsharded gradients and communicate none."""
        before, self.silent = self.silent, True
        try:
            yield
        finally:
            self.silent = before

    # -- a reduction ---------------------------------------------------------------------------------------------

    def reduce(self, key: Key, *, tied: bool = False) -> None:
        """Reduce what belongs to `key`: tied chunks, or those that are not."""
        for entry in self._of[key]:
            if entry.tied == tied:
                self.reduce_one(entry)

    @torch.no_grad()
    def reduce_one(self, entry: Reducible) -> None:
        """Reduce the gradients that have accumulated in one buffer, and keep this rank's shard of their sum."""
        ranks, buffer = entry.ranks, entry.buffer
        full = buffer.take()
        if ranks.size == 1:
            full = buffer.hand_over()  # it stays as it is
        with self._stream.after_compute():
            if entry.residual is None and ranks.shard is not None:
                entry.residual = self._compression.new_residual(full)
            shard = reduce_chunk(full, ranks, entry.spec, self._compression, entry.residual, entry.peer)
            entry.keep(shard)
        if ranks.size > 1:
            self._under_way.append((self._stream.mark(), buffer))

    def make_room(self) -> None:
        """Wait for all but the last few reductions and close their buffers; called before another is opened."""
        while len(self._under_way) > self._ahead:
            self._close()

    def join(self) -> None:
        """Let the compute stream wait for every reduction."""
        while self._under_way:
            self._close()
        self._stream.join()

    def _close(self) -> None:
        handle, buffer = self._under_way.popleft()
        handle.wait()
        buffer.close()
