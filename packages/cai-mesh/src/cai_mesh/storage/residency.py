"""The residency of shards between uses: its interface, and the one that leaves everything on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from cai_mesh.comm.groups import AnyMesh
from cai_mesh.comm.handles import Done
from cai_mesh.gradients.buffer import GradBuffer
from cai_mesh.gradients.gradient_views.parameters import set_raw_grad
from cai_mesh.protocols import CommHandle
from cai_mesh.storage.unit import FlatUnit


class StoredShard:
    """The shard of a chunk that one rank keeps between uses.

    Args:
        unit: the unit whose shard it is.
        device: the device on which it is used.
        gradients: dtype in which its gradients arrive; None while it is frozen.

    Attributes:
        on_device: [n], the shard on `device` in its own dtype or in that of the unsharded chunk, from the `wait` of a
            fetch until the release.
        unreduced: the gradients that are still to be reduced; None while it is frozen.
        complete: returns with the gradients of the coming step complete, as all ranks have agreed. Collective, unless
            they are already.
    """

    def __init__(self, unit: FlatUnit, device: torch.device, gradients: torch.dtype | None):
        self.unit, self.device, self.gradients = unit, device, gradients
        self.on_device: torch.Tensor | None = None
        self.unreduced: GradBuffer | None = None
        self.complete: Callable[[], None] = lambda: None


class OnDevice:
    """The `Residency` that leaves everything where it is."""

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def adopt(self, stored: Sequence[StoredShard], mesh: AnyMesh | None) -> None:
        return None

    def train(self, stored: StoredShard) -> None:
        return None

    def fetch(self, stored: StoredShard) -> CommHandle:
        stored.on_device = stored.unit.shard
        return Done()

    def release(self, stored: StoredShard) -> None:
        stored.on_device = None

    def version(self, stored: StoredShard) -> int:
        return stored.unit.shard._version

    def keep_gradient(self, stored: StoredShard, shard: torch.Tensor) -> None:
        gradient, shard = stored.unit.shard_gradient, shard.to(stored.unit.shard.dtype)
        if gradient is None:
            stored.unit.set_shard_gradient(shard)
        else:
            gradient.add_(shard)

    def drop_gradient(self, stored: StoredShard, index: int) -> None:
        set_raw_grad(stored.unit.kept[index], None)
