"""The optimizer's step over chunks on a disk: read, stepped and written back one after the other, in the background."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch

from cai_gemini.copies import Scalar
from cai_gemini.held import Held
from cai_gemini.nvme import NvmeStore, stream
from cai_gemini.timeline import host_span

Job = Callable[[list[torch.Tensor]], None]


def step_on_disk(store: NvmeStore, helds: Sequence[Held], scale: float | Scalar) -> None:
    """Step chunks whose state is on the disk, in order, in the background: each is awaited where it is used.

    A chunk's step is over when its writes are under way: the store lets no read of a region pass them.
    """
    if not helds:
        return
    jobs = [(held, job) for held in helds if (job := _job(held, scale)) is not None]
    done: list[Future[None]] = [Future() for _ in jobs]
    chunks = [held.disk_regions() for held, _ in jobs]
    begun: list[float] = []

    def work(index: int, tensors: list[torch.Tensor]) -> None:
        jobs[index][1](tensors)

    def wrote(index: int) -> None:
        _show(jobs[index][0], begun.pop())
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


def _job(held: Held, scale: float | Scalar) -> Job | None:
    """What steps tensors that were read from the chunk's `disk_regions`; None where there is no gradient."""
    disk = held.disk
    assert disk is not None
    held.finish_writing()
    held.unload()
    taken = held.take_gradient()
    if taken is None:
        return None
    gradient, groups, _ = taken

    def run(tensors: list[torch.Tensor]) -> None:
        ready = gradient.settled()
        partly = sum(len(indices) for _, indices in groups) < len(held.unit.kept)
        with host_span(held.copies.recorder, held.name):
            disk.step(groups, (ready, float(scale)), tensors, held.home.among(tensors, partly=partly))
        held.copies.host.give(gradient.tensor)

    return run


def _show(held: Held, begun: float) -> None:
    """On a timeline: from `begun`, of `time.perf_counter`, until now the disk was at work for this chunk."""
    if held.copies.recorder is not None:
        held.copies.recorder.span("disk", begun, time.perf_counter(), held.name)
