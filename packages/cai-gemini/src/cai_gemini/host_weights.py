"""A chunk's weights in host memory, in the dtype of computation: what is copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from cai_gemini.copies import Copied, Copies
from cai_gemini.disk_weights import DiskWeights
from cai_gemini.nvme import Region
from cai_gemini.unit import Unit


class HostWeights:
    """The host copy of a chunk's weights, which copies to the device read; it follows the master weights.

    Args:
        unit: the chunk.
        copies: to its device.

    Attributes:
        tensor: [n] in the dtype of computation; nothing where the weights are on a disk.
        disk: where they are there.
        changes: of the master weights' values that were taken over.
    """

    def __init__(self, unit: Unit, copies: Copies):
        self._unit, self._copies = unit, copies
        self.tensor = copies.host.take(unit.shard.numel(), unit.whole.dtype)
        self.tensor.copy_(unit.shard)
        self.disk: DiskWeights | None = None
        self._version, self.changes = self._versions(), 0
        self._copied: Copied | None = None  # last

    def to_disk(self, disk: DiskWeights) -> None:
        """The weights are on a disk now."""
        self._copies.host.give(self.tensor)
        self.disk, self.tensor = disk, self.tensor.new_empty(0)

    def _versions(self) -> int:
        """Grows with every write to the master weights."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._unit.shard._version + sum(param._version for param in self._unit.kept)

    @property
    def is_old(self) -> bool:
        """Whether somebody has written to the master weights (a checkpoint was loaded)."""
        return self._version != self._versions()

    def version(self, *, under_way: bool) -> int:
        """Another number whenever the values have changed, or the master weights have, unless a step is `under_way`."""
        return self.changes + (0 if under_way else self._versions() - self._version)

    def adopt(self, *, changed: bool = False) -> None:
        """The values are those of the master weights; `changed`: others than before, which no step made."""
        now = self._versions()
        self.changes += now - self._version if changed else 0
        self._version = now

    def refresh(self) -> None:
        """Take over master weights that somebody has written to."""
        if self.is_old:
            self.wait_until_read()
            self._copy()
            self.adopt(changed=True)

    @torch.no_grad()
    def _copy(self) -> None:
        with torch._C.DisableTorchFunctionSubclass():
            if self.disk is not None:
                self.disk.write(self._unit.shard)
            else:
                self.tensor.copy_(self._unit.shard)

    @torch.no_grad()
    def send(self, free: torch.cuda.Event | None, coming: Future[Copied], name: str) -> None:
        """Begin to copy to the device, once the compute stream has passed `free`; `coming` gets the copy."""
        target = self._unit.whole.data
        if self.disk is not None:
            self.disk.fetch(self._copies, target, free, coming, name)
            return
        self._copied = self._copies.to_device(target, self.tensor, free, kept=True, name=name)
        coming.set_result(self._copied)

    @property
    def regions(self) -> list[Region]:
        """What a step on a disk writes for the weights, beside the master weights."""
        return [] if self.disk is None or self.disk.own is None else [self.disk.own]

    def among(self, tensors: Sequence[torch.Tensor], *, partly: bool) -> torch.Tensor:
        """Where a step on a disk puts new weights: here, or among what it read, with the values of what it leaves out.

        Args:
            tensors: the master weights first, those of `regions` last.
            partly: whether it leaves parameters out.
        """
        if self.disk is None:
            return self.tensor
        if not self.regions:
            return tensors[0]
        if partly:
            tensors[-1].copy_(tensors[0])
        return tensors[-1]

    def wait_until_read(self) -> None:
        """Return once no copy reads the weights any more."""
        if self._copied is not None:
            self._copied.synchronize()
