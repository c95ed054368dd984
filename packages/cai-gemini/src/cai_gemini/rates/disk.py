"""Measures a disk in a fraction of a second before training."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence

import torch

from cai_gemini.nvme import Handle, NvmeStore

DISK_BYTES, DISK_PIECE, DISK_DEPTH, DISK_SECONDS = 2**28, 2**23, 8, 0.25


def measure_disk(directory: str | os.PathLike[str]) -> tuple[float, float]:
    """Bytes a second that a disk reads and writes, by a store of its own that is gone afterwards.

    At most `DISK_BYTES` are moved each way, and no more than `DISK_SECONDS` begun. Raises `NvmeError`.
    """
    pieces = max(min(DISK_BYTES, shutil.disk_usage(directory).free // 8) // DISK_PIECE, 1)
    with NvmeStore(directory) as store:
        regions = [store.reserve("a measurement", DISK_PIECE, torch.uint8) for _ in range(pieces)]
        buffers = [store.buffer(DISK_PIECE, torch.uint8).zero_() for _ in range(min(DISK_DEPTH, pieces))]
        count, writing = _moved(lambda i, buffer: store.write(regions[i], buffer), pieces, buffers)
        again, reading = _moved(lambda i, buffer: store.read(regions[i], buffer), count, buffers)
    return again * DISK_PIECE / reading, count * DISK_PIECE / writing


def _moved(
    start: Callable[[int, torch.Tensor], Handle], pieces: int, buffers: Sequence[torch.Tensor]
) -> tuple[int, float]:
    """Return how many pieces were moved, with as many at once as there are buffers, and in how many seconds."""
    begin, under_way = time.perf_counter(), list[Handle]()
    for i in range(pieces):
        if len(under_way) == len(buffers):
            under_way.pop(0).wait()
        if i and time.perf_counter() - begin > DISK_SECONDS:
            pieces = i
            break
        under_way.append(start(i, buffers[i % len(buffers)]))
    for handle in under_way:
        handle.wait()
    return pieces, time.perf_counter() - begin
