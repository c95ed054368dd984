"""The optimizer's step over chunks on a disk: read, stepped and written back one after the other, in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.memory.copies import Scalar
from cai_gemini.memory.timeline import host_span
from cai_gemini.nvme import NvmeStore, stream

Job = Callable[[list[torch.Tensor]], None]


class DiskSteps:
    """The `Stepper` of chunks whose state is on a disk.

    Args:
        store: the store that has their state.
    """

    def __init__(self, store: NvmeStore):
        self._store = store

    def step(self, chunks: Sequence[OffloadedChunk], scale: float | Scalar) -> None:
        """Step chunks in order, in the background: each is awaited where it is used.

        A chunk's step is over when its writes are under way: the store lets no read of a region pass them.
        """
        jobs = [(chunk, job) for chunk in chunks if (job := _job(chunk, scale)) is not None]
        if not jobs:
            return
        done: list[Future[None]] = [Future() for _ in jobs]
        regions = [chunk.disk_regions() for chunk, _ in jobs]
        begun: list[float] = []

        def work(index: int, tensors: list[torch.Tensor]) -> None:
            jobs[index][1](tensors)

        def wrote(index: int) -> None:
            _show(jobs[index][0], begun.pop())
            begun.append(time.perf_counter())
            done[index].set_result(None)

        def run() -> None:
            begun.append(time.perf_counter())
            weights = [chunk.host_weights.disk for chunk, _ in jobs]
            unread = {disk.own for disk in weights if disk is not None} - {None}
            try:
                stream(self._store, regions, work, unread=unread, wrote=wrote)
            except BaseException as error:
                for future in done:
                    if not future.done():
                        future.set_exception(error)
                raise

        all_of_them = jobs[0][0].worker.submit(run)
        for (chunk, _), future in zip(jobs, done, strict=True):
            chunk.stepped_by(future, also=all_of_them)


def _job(chunk: OffloadedChunk, scale: float | Scalar) -> Job | None:
    """Return what steps tensors read from the chunk's `disk_regions`; None where there is no gradient."""
    disk = chunk.disk
    assert disk is not None
    chunk.finish_writing()
    chunk.unload()
    job = chunk.take_gradient()
    if job is None:
        return None
    gradient, groups, _ = job

    def run(tensors: list[torch.Tensor]) -> None:
        ready = gradient.settled()
        partly = sum(len(indices) for _, indices in groups) < len(chunk.unit.kept)
        with host_span(chunk.copies.recorder, chunk.name):
            weights = chunk.host_weights.among(tensors, partly=partly)
            disk.step(groups, (ready, float(scale)), tensors, weights)
        chunk.copies.host.give(gradient.tensor)

    return run


def _show(chunk: OffloadedChunk, begun: float) -> None:
    """Show on a timeline that the disk was at work for this chunk from `begun`, of `time.perf_counter`, until now."""
    if chunk.copies.recorder is not None:
        chunk.copies.recorder.span("disk", begun, time.perf_counter(), chunk.name)
