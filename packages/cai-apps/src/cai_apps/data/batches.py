"""Which samples a data rank reads in a step, whatever they are.

Step s of a run consumes the samples [s * B, (s + 1) * B) of an endless shuffled order, whatever the layout; a data
rank takes a contiguous part of those. So the position of a run is one number, and any layout goes on where another
stopped.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.shuffle import permute

Microbatches = list[dict[str, Tensor]]
Blank = Callable[[dict[str, Tensor], Tensor], dict[str, Tensor]]
"""(rows, bool [n]) -> the rows, of which those that are marked have no target."""
PRESENT = "present"
"""The name, in rows whose samples are counted one by one, of 1.0 for each that has a target and 0.0 for the others."""


class Samples(Protocol):
    """A finite set of samples that can be read in any order."""

    @property
    def size(self) -> int:
        """The number of samples."""
        ...

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return samples by number: tensors by name, each [n, ...], in host memory.

        Args:
            indices: numbers of the samples, int64 [n].
            positions: their places in the run's endless order, int64 [n]: what is drawn for a sample depends on it.
        """
        ...


@dataclass(frozen=True)
class Batches:
    """The part of each global batch that one data rank reads."""

    samples: Samples
    global_batch: int
    microbatch_size: int
    data_rank: int
    data_ranks: int
    seed: int | None
    """Seed of the order; None: the samples keep their own, and are read once."""
    blank: Blank | None = None
    """Takes the targets of what fills the last batch where the samples are read once; None: they fill whole batches."""

    def at(self, position: int) -> Microbatches:
        """Return this data rank's microbatches of the global batch that starts at sample `position`."""
        share = self.global_batch // self.data_ranks
        first = position + self.data_rank * share
        positions = np.arange(first, first + share)
        rows = self._rows(positions)
        pieces = {name: value.split(self.microbatch_size) for name, value in rows.items()}
        return [dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)]

    def _rows(self, positions: np.ndarray) -> dict[str, Tensor]:
        """Return the rows of some positions; those beyond samples that are read once have no target."""
        missing = positions >= self.samples.size
        if self.seed is not None or self.blank is None or not missing.any():
            return self.samples.rows(self._order(positions), positions)
        rows = self.samples.rows(np.where(missing, self.samples.size - 1, positions), positions)
        return self.blank(rows, torch.from_numpy(missing))

    def _order(self, samples: np.ndarray) -> np.ndarray:
        epochs, within = np.divmod(samples, self.samples.size)
        if self.seed is None:
            return within
        order = np.empty_like(within)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            order[chosen] = permute(within[chosen], self.samples.size, seed=self.seed, epoch=int(epoch))
        return order


class Prefetch:
    """Reads the next global batch in a thread while this one is trained on, into pinned memory for a GPU.

    Args:
        batches: the batches that are read.
        device: the device that the microbatches go to; copies to a GPU are queued behind its work, and nobody waits.
    """

    def __init__(self, batches: Batches, device: torch.device):
        self._batches, self._device = batches, device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._ahead: tuple[int, Future[Microbatches]] | None = None

    def take(self, position: int, *, last: bool = False) -> tuple[Microbatches, Microbatches]:
        """Return the batch at `position`, on the host and on the device; the one after it is read from now on.

        Args:
            last: there is none after it.
        """
        ahead, self._ahead = self._ahead, None
        known = ahead is not None and ahead[0] == position
        host_batch = ahead[1].result() if ahead is not None and known else self._read(position)
        if not last:
            following = position + self._batches.global_batch
            self._ahead = following, self._thread.submit(self._read, following)
        return host_batch, [
            {name: value.to(self._device, non_blocking=True) for name, value in batch.items()}
            for batch in host_batch
        ]

    def _read(self, position: int) -> Microbatches:
        found = self._batches.at(position)
        if self._device.type != "cuda":
            return found
        return [{name: value.pin_memory() for name, value in batch.items()} for batch in found]

    def close(self) -> None:
        """Stop reading ahead."""
        self._thread.shutdown(wait=True, cancel_futures=True)


def mark(rows: dict[str, Tensor], missing: Tensor) -> dict[str, Tensor]:
    """Return rows of samples that are counted one by one, with those that are marked (bool [n]) as not present."""
    return rows | {PRESENT: (~missing).double()}


def count_present(rows: dict[str, Tensor], samples: int) -> int:
    """Return how many of so many samples are present."""
    return int(rows[PRESENT].sum()) if PRESENT in rows else samples
