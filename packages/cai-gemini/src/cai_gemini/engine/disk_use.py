"""Lets chunks use the disk that a plan puts there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.disk_weights import DiskReaders
from cai_gemini.engine.engine import Engine
from cai_gemini.nvme import NvmeStore
from cai_gemini.planning.disk_plan import ChunkBytes, OnDisk, disk_bytes
from cai_gemini.planning.simulation import DiskBytes, Rates
from cai_gemini.rates import measure_disk
from cai_mesh.errors import PlanError


def open_store(
    nvme: str | os.PathLike[str] | None, sizes: Sequence[ChunkBytes], on_disk: OnDisk
) -> NvmeStore | None:
    """A store in directory `nvme`, if any chunk uses one.

    Raises `PlanError` where the disk has no room for them, `NvmeError` for a bad directory.
    """
    if nvme is None or not on_disk.every:
        return None
    store, needed = NvmeStore(nvme), disk_bytes(sizes, on_disk)
    free = shutil.disk_usage(nvme).free
    if needed > free:
        store.close()
        raise PlanError(
            f"the disk has no room for {'state and weights' if on_disk.weights else 'the state'}",
            got=f"{free:,} bytes free in {os.fspath(nvme)}",
            expected=f"about {needed:,} bytes",
            fix="free space there, name a larger disk, or keep more in host memory",
        )
    return store


def rates_with_disk(store: NvmeStore | None, rates: Rates) -> Rates:
    """Return `rates` with what the disk of `store`, if there is one, was measured to do."""
    if store is None:
        return rates
    read, written = measure_disk(os.path.dirname(store.path))
    return replace(rates, disk_read=read, disk_write=written)


def disk_traffic(chunks: Sequence[OffloadedChunk]) -> dict[int, DiskBytes]:
    """Return what chunks move from and to the disk, by index, as far as it is known before the first step."""
    traffic: dict[int, DiskBytes] = {}
    for index, chunk in enumerate(chunks):
        if chunk.disk is not None:
            weights = chunk.sizes.weights if chunk.host_weights.disk is not None else 0
            steps = chunk.step is not None
            read = sum(region.nbytes for region in chunk.disk.regions) if steps else 0
            written = sum(region.nbytes for region in chunk.disk_regions()) if steps else 0
            traffic[index] = DiskBytes(read, written, weights)
    return traffic


def disk_user(
    engine: Engine, sizes: Sequence[ChunkBytes], on_disk: OnDisk
) -> Callable[[int, OffloadedChunk], None]:
    """Return what puts chunks, by index, on the disk as soon as they are made, so that one at a time is in memory."""
    store = engine.store
    if store is None:
        return lambda index, chunk: None
    largest = max((sizes[i].weights for i in on_disk.weights), default=0)
    readers = DiskReaders(store, largest, engine.copies.device) if largest else None

    def use(index: int, chunk: OffloadedChunk) -> None:
        if index in on_disk.every:
            chunk.to_disk(store, readers if index in on_disk.weights else None)

    return use
