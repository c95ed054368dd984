"""`stream`: a loop over chunks on disk that reads the next and writes back the last while this one is worked on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence

import torch

from cai_gemini.nvme.errors import NvmeError
from cai_gemini.nvme.store import Handle, NvmeStore, Region


def stream(
    store: NvmeStore,
    chunks: Sequence[Sequence[Region]],
    work: Callable[[int, list[torch.Tensor]], None],
    *,
    buffers: int = 2,
    writes: Collection[int] | None = None,
    unread: Collection[Region] = (),
    wrote: Callable[[int], None] = lambda index: None,
) -> None:
    """Call `work(i, tensors)` for every chunk in order, as if each were read before and written back after it.

    While `work(i, ...)` runs, chunk `i - 1` is written back and then chunk `i + 1` read into the same memory. An
    optimizer step over state on a disk is such a loop: a chunk is (master weights, momentum, variance).

    Args:
        store: that holds all regions.
        chunks: the regions of each chunk, each once; a region may stand in several chunks.
        work: gets flat host tensors in memory from the store's `buffer`, one a region, and changes them in place. They
            are its own until it returns: it waits for copies to or from a GPU that it started.
        buffers: chunks in memory, at least 2. Their size is that of the largest chunk.
        writes: the positions of a chunk that are written back; None: all.
        unread: regions that are not read: `work` gives all of their tensors new values.
        wrote: called once the writes of a chunk are under way; what reads its regions from then on, reads those.

    Raises what `work` raises, and `NvmeError` for a disk that fails. Nothing is under way then, except requests stuck
    at the disk. Each region then holds what it held, or what `work` made of it, or cannot be read.
    """
    if buffers < 2:
        raise NvmeError("a stream needs two buffers", got=buffers, expected="at least 2")
    for index, chunk in enumerate(chunks):
        if len({id(region) for region in chunk}) != len(chunk):
            raise NvmeError(f"chunk {index} names a region twice", got=[region.name for region in chunk])
    loop = _Loop(store, chunks, buffers, unread)
    try:
        for index in range(len(chunks)):
            loop.read_ahead(index)
            work(index, loop.wait(index))
            loop.write_back(index, writes)
            wrote(index)
        loop.drain()
    except BaseException:
        loop.settle()
        raise


class _Loop:
    """The memory and the requests of one stream. Slot `i % buffers` is chunk `i`'s."""

    def __init__(
        self,
        store: NvmeStore,
        chunks: Sequence[Sequence[Region]],
        buffers: int,
        unread: Collection[Region],
    ):
        self._store, self._chunks, self._unread = store, chunks, unread
        size = max((sum(self._room(region) for region in chunk) for chunk in chunks), default=0)
        self._slots = store.lend_scratch(max(1, size), min(buffers, len(chunks)))
        self._reads: dict[int, list[Handle]] = {}
        self._writes: dict[int, list[Handle]] = {}
        self._next = 0

    def _room(self, region: Region) -> int:
        return -(-region.nbytes // self._store.alignment) * self._store.alignment

    def _tensors(self, index: int) -> list[torch.Tensor]:
        slot, start, tensors = self._slots[index % len(self._slots)], 0, []
        for region in self._chunks[index]:
            tensors.append(slot[start : start + region.nbytes].view(region.dtype))
            start += self._room(region)
        return tensors

    def read_ahead(self, index: int) -> None:
        """Start every read that has a slot and whose regions no chunk from `index` on will still write."""
        while self._next < min(index + len(self._slots), len(self._chunks)) and self._settled(index):
            chunk = self._next
            before = self._writes.pop(chunk - len(self._slots), [])
            # The writes that leave this slot end before its reads begin, and are answered for together with them.
            started = self._reads[chunk] = [*before]
            for region, out in zip(self._chunks[chunk], self._tensors(chunk), strict=True):
                if region not in self._unread:
                    started.append(self._store.read(region, out, after=before))
            self._next += 1

    def _settled(self, index: int) -> bool:
        pending = {id(region) for chunk in self._chunks[index : self._next] for region in chunk}
        return not any(id(region) in pending for region in self._chunks[self._next])

    def wait(self, index: int) -> list[torch.Tensor]:
        """The tensors of a chunk, read."""
        for handle in self._reads[index]:
            handle.wait()
        del self._reads[index]
        return self._tensors(index)

    def write_back(self, index: int, writes: Collection[int] | None) -> None:
        """Start the writes of a chunk."""
        pairs = zip(self._chunks[index], self._tensors(index), strict=True)
        started = self._writes[index] = []
        for position, (region, tensor) in enumerate(pairs):
            if writes is None or position in writes:
                started.append(self._store.write(region, tensor))

    def drain(self) -> None:
        """Wait for the last writes; raise what went wrong in them. The memory is the store's again."""
        for handle in [handle for handles in self._writes.values() for handle in handles]:
            handle.wait()
        self._store.keep_scratch(self._slots)

    def settle(self) -> None:
        """Wait until nothing is under way, after an error: what else goes wrong is of no further interest."""
        for handles in (*self._reads.values(), *self._writes.values()):
            for handle in handles:
                with contextlib.suppress(Exception):
                    handle.wait()
