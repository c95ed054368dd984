"""Moving rows between host tensors and their cached copies, in gathered copies on a stream of their own."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from cai_gemini.embedding.slots import Placement
from cai_mesh.comm import SideStream


class Pair:
    """A value with one entry for each row of the table.

    Args:
        host: host tensor [rows, ...].
        cache: device tensor [slots, ...], same dtype; an entry of a cached row is newer than that on the host.
        written: whether entries change on the device and are copied back when their row leaves.
    """

    def __init__(self, host: torch.Tensor, cache: torch.Tensor, *, written: bool = True):
        self.host, self.cache, self.written = host, cache, written
        self._version = host._version

    @property
    def rewritten(self) -> bool:
        """Whether somebody else wrote into `host` (a checkpoint that was loaded)."""
        return self.host._version != self._version

    def seen(self) -> None:
        """Take note of the present content of `host`."""
        self._version = self.host._version


@dataclass(frozen=True)
class _Return:
    """Rows on their way to the host: complete once `event` is past."""

    event: torch.cuda.Event | None
    rows: torch.Tensor
    values: tuple[tuple[Pair, torch.Tensor], ...]


class Rows:
    """Fetches and returns the rows of several pairs together.

    Args:
        stream: the stream on which rows move. Everything but `finish` is called inside its `work`.
    """

    def __init__(self, stream: SideStream):
        self.pairs: dict[str, Pair] = {}
        self._stream = stream
        self._returning: list[_Return] = []

    def fetch(self, host_rows: torch.Tensor, slots: torch.Tensor, pairs: Iterable[Pair] | None = None) -> int:
        """Copy rows (int64 [M], host) of the pairs (None: of all) into `slots` (device); returns the bytes moved.

        Rows on their way to the host are not looked at: call `finish` first where they may be among these.
        """
        moved = 0
        for pair in self.pairs.values() if pairs is None else pairs:
            shape = (len(host_rows), *pair.host.shape[1:])
            staged = torch.empty(shape, dtype=pair.host.dtype, pin_memory=slots.is_cuda)
            torch.index_select(pair.host, 0, host_rows, out=staged)
            pair.cache.index_copy_(0, slots, staged.to(slots.device, non_blocking=True))
            moved += staged.nbytes
        return moved

    def give_back(self, rows: torch.Tensor, slots: torch.Tensor, pairs: Iterable[Pair]) -> int:
        """Start copying `slots` back to `rows` (both on the device); `finish` completes it. Returns the bytes moved."""
        values = tuple((pair, _to_host(pair.cache.index_select(0, slots))) for pair in pairs)
        host_rows = _to_host(rows)
        self._returning.append(_Return(self._stream.mark().event, host_rows, values))
        return sum(value.nbytes for _, value in values)

    def exchange(
        self, placement: Placement, missing: torch.Tensor, leaving: Iterable[Pair]
    ) -> tuple[int, int]:
        """Start returning the `leaving` pairs of the rows that leave, and fetch the `missing` ones (host) for them.

        Returns the bytes moved (to the device, to the host).
        """
        self.finish()
        out = 0
        if len(placement.left_rows):
            out = self.give_back(placement.left_rows, placement.left_slots, leaving)
        return self.fetch(missing, placement.slots), out

    def finish(self) -> None:
        """Write into the host tensors what was on its way. The host waits for copies that are not complete."""
        for back in self._returning:
            if back.event is not None:
                back.event.synchronize()
            for pair, value in back.values:
                pair.host.index_copy_(0, back.rows, value)
                pair.seen()
        self._returning.clear()


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
