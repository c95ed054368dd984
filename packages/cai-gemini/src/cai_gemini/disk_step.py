"""The optimizer's step over chunks on a disk: read, stepped and written back one after the other, in the background."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from cai_gemini.copies import Scalar
from cai_gemini.nvme import NvmeStore, stream

if TYPE_CHECKING:
    from cai_gemini.held import Held


def step_on_disk(store: NvmeStore, helds: Sequence[Held], scale: float | Scalar) -> None:
    """Step chunks whose state is on the disk, in order, in the background: each is awaited where it is used.

    A chunk's step is over when its writes are under way: the store lets no read of a region pass them.
    """
    if not helds:
        return
    jobs = [(held, job) for held in helds if (job := held.step_on_disk(scale)) is not None]
    done: list[Future[None]] = [Future() for _ in jobs]
    chunks = [held.disk_regions() for held, _ in jobs]
    begun: list[float] = []

    def work(index: int, tensors: list[torch.Tensor]) -> None:
        jobs[index][1](tensors)

    def wrote(index: int) -> None:
        jobs[index][0].show_disk(begun.pop())
        begun.append(time.perf_counter())
        done[index].set_result(None)

    def run() -> None:
        begun.append(time.perf_counter())
        unread = {held.home.disk.own for held, _ in jobs if held.home.disk is not None} - {None}
        try:
            stream(store, chunks, work, unread=unread, wrote=wrote)
        except BaseException as error:
            for future in done:
                if not future.done():
                    future.set_exception(error)
            raise

    whole = jobs[0][0].worker.submit(run) if jobs else None
    for (held, _), future in zip(jobs, done, strict=True):
        held.stepped_by(future, also=whole)
