"""A chunk's weights in host memory, in the dtype of computation: what is copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future

import torch

from cai_gemini.chunk.disk_weights import DiskWeights
from cai_gemini.chunk.unit import Unit
from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.nvme import Region


class HostWeights:
    """The host copy of a chunk's weights. The device gets its weights from here; a step writes new ones here.

    Args:
        unit: the chunk.
        copies: the copies to its device.

    Attributes:
        tensor: [n] in the dtype of computation; nothing where the weights are on a disk.
        disk: the weights on a disk, where they are there.
        changes: the number of times that the master weights got other values, which the host copy has or will have.
    """

    def __init__(self, unit: Unit, copies: Copies):
        self._unit, self._copies = unit, copies
        self.tensor = copies.host.take(unit.shard.numel(), unit.weights.dtype)
        self.tensor.copy_(unit.shard)
        self.disk: DiskWeights | None = None
        self._version, self.changes = self._versions(), 0
        self._copied: Copied | None = None  # the last copy to the device

    def to_disk(self, disk: DiskWeights) -> None:
        """Keep the weights on a disk from now on; the host memory is given up."""
        self._copies.host.give(self.tensor)
        self.disk, self.tensor = disk, self.tensor.new_empty(0)

    def _versions(self) -> int:
        """A number that grows with every write to the master weights."""
        with torch._C.DisableTorchFunctionSubclass():
            return self._unit.shard._version + sum(param._version for param in self._unit.kept)

    @property
    def is_old(self) -> bool:
        """Whether somebody has written to the master weights since (a checkpoint was loaded, say)."""
        return self._version != self._versions()

    def version(self, *, under_way: bool) -> int:
        """A number that is another one whenever the weights got other values.

        under_way: a step is writing to the master weights now, which `changes` has counted already.
        """
        return self.changes + (0 if under_way else self._versions() - self._version)

    def adopt(self, *, changed: bool = False) -> None:
        """Take note that the host copy has the values of the master weights.

        changed: they are others than before, and no step made them.
        """
        now = self._versions()
        self.changes += now - self._version if changed else 0
        self._version = now

    def refresh(self) -> None:
        """Copy the master weights here if somebody has written to them."""
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
        """Begin to copy the weights to the device; `coming` gets the copy.

        free: an event of the compute stream, after which the device memory may be written.
        """
        target = self._unit.weights.data
        if self.disk is not None:
            self.disk.fetch(self._copies, target, free, coming, name)
            return
        self._copied = self._copies.to_device(target, self.tensor, free, hold=True, name=name)
        coming.set_result(self._copied)

    @property
    def regions(self) -> list[Region]:
        """Regions that a step on a disk writes new weights to, beside those of the master weights."""
        return [] if self.disk is None or self.disk.own is None else [self.disk.own]

    def among(self, tensors: Sequence[torch.Tensor], *, partly: bool) -> torch.Tensor:
        """Return where a step on a disk puts new weights: into the host copy, or into one of the tensors that it read.

        Args:
            tensors: its tensors as read: the master weights first, those of `regions` last.
            partly: whether it leaves parameters out, whose weights are filled in here.
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
