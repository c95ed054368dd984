"""Optimizer state on a disk: read, stepped and written back chunk by chunk, or lent to whoever reads it.

Between uses the kept parameters have shapes and no values. Whoever reads one is lent the chunk: its master weights and
moments come into memory, and stay until the next step, which writes back what was changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch

from cai_gemini.nvme import NvmeStore, stream

if TYPE_CHECKING:
    from cai_gemini.held import Held

State3 = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
SLOTS = ("master weights", "first moment", "second moment")


class DiskState:
    """Master weights and Adam's moments of one chunk, on a disk from now on.

    Args:
        held: the chunk.
        store: takes three regions for it. Raises `NvmeError` where the disk has no room.
    """

    def __init__(self, held: Held, store: NvmeStore):
        self._held, self._store = held, store
        shard = held.unit.shard
        self.regions = [store.reserve(f"{held.name} ({slot})", shard.numel(), shard.dtype) for slot in SLOTS]
        self._lent: list[int] | None = [-1] * 3  # versions of what is in memory; none written yet
        self.give_back()

    def _tensors(self) -> State3:
        assert self._held.step is not None
        return (self._held.unit.shard, *self._held.step.moments())

    def _put(self, state: Sequence[torch.Tensor]) -> None:
        assert self._held.step is not None
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            self._held.unit.move_shard(state[0])
        self._held.step.put_moments(state[1], state[2])
        self._held.adopt_version()

    def _versions(self) -> list[int]:
        with torch._C.DisableTorchFunctionSubclass():
            kept = sum(param._version for param in self._held.unit.kept)
            return [kept + tensor._version for tensor in self._tensors()]

    def borrow(self) -> None:
        """Bring the state into memory, unless it is there."""
        if self._lent is not None:
            return
        numel, dtype = self.regions[0].numel, self.regions[0].dtype
        state = [self._store.buffer(numel, dtype) for _ in self.regions]
        reads = [self._store.read(region, out) for region, out in zip(self.regions, state, strict=True)]
        for read in reads:
            read.wait()
        self._put(state)
        self._lent = self._versions()

    def give_back(self) -> None:
        """Write what has changed in memory and let go of it."""
        if self._lent is None:
            return
        if self._lent != self._versions():
            writes = [self._store.write(r, t) for r, t in zip(self.regions, self._tensors(), strict=True)]
            for write in writes:
                write.wait()
        nothing = torch.zeros(1, dtype=self.regions[0].dtype).expand(self.regions[0].numel)
        self._put([nothing] * 3)
        self._lent = None


def step_on_disk(store: NvmeStore, helds: Sequence[Held], scale: float | torch.Tensor) -> None:
    """Step chunks whose state is on the disk, in order, in the background: each is awaited where it is used."""
    if not helds:
        return
    value = float(scale)
    jobs = [(held, job) for held in helds if (job := held.step_on_disk(value)) is not None]
    done: list[Future[None]] = [Future() for _ in jobs]

    def work(index: int, tensors: list[torch.Tensor]) -> None:
        jobs[index][1]((tensors[0], tensors[1], tensors[2]))
        done[index].set_result(None)

    def run() -> None:
        try:
            stream(store, [held.disk.regions for held, _ in jobs if held.disk is not None], work)
        except BaseException as error:
            for future in done:
                if not future.done():
                    future.set_exception(error)
            raise

    whole = jobs[0][0].worker.submit(run) if jobs else None
    for (held, _), future in zip(jobs, done, strict=True):
        held.stepped_by(future, also=whole)
