"""A rank's shards of a model's chunks, as chunks that an engine moves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.engine.engine import Engine
from cai_gemini.planning.disk_plan import ChunkBytes, state_tensors
from cai_gemini.planning.policy import IN_FLIGHT
from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer
from cai_mesh.layout import FlatChunk
from cai_mesh.storage import StoredShard


class ShardUnit:
    """One rank's shard of a chunk; a `cai_gemini.chunk.unit.Unit`.

    Args:
        stored: the shard. It stays; a copy in the dtype of the unsharded chunk is `stored.on_device` while in use.
    """

    def __init__(self, stored: StoredShard):
        self._stored, unit = stored, stored.unit
        self.chunk: FlatChunk = unit.chunk
        self.kept: Sequence[nn.Parameter] = unit.kept
        self.used: Sequence[nn.Parameter] = unit.used
        self.ranges: Sequence[tuple[int, int]] = unit.ranges
        self.weights = torch.empty(unit.shard.numel(), dtype=unit.unsharded.dtype, device=stored.device)
        self.is_in_use = False
        self.free_storage()

    @property
    def shard(self) -> torch.Tensor:
        return self._stored.unit.shard

    @property
    def unreduced(self) -> GradBuffer | None:
        return self._stored.unreduced

    def complete(self) -> None:
        self._stored.complete()

    def move_shard(self, shard: torch.Tensor) -> None:
        self._stored.unit.move_shard(shard)

    def allocate_storage(self) -> None:
        self.weights.untyped_storage().resize_(self.weights.numel() * self.weights.element_size())

    def swap_in(self) -> None:
        self._stored.on_device, self.is_in_use = self.weights, True

    def hide(self) -> None:
        self._stored.on_device, self.is_in_use = None, False

    def free_storage(self) -> None:
        self.hide()
        self.weights.untyped_storage().resize_(0)


class ShardEngine(Engine):
    """Its pass is from one step of the optimizer to the next, whatever lies between."""

    def step(self, scale: float | torch.Tensor) -> None:
        self.end()
        super().step(scale)
        self.begin()

    def drop_gradients(self, *, zeros: bool = False) -> None:
        """Forget every gradient, or let it be zero; where there are any, the step is left out, and another begins."""
        left_out = any(chunk.gradients.gradient is not None for chunk in self.chunks)
        super().drop_gradients(zeros=zeros)
        if left_out:
            self.begin()


class Arriving:
    """The `CommHandle` of a fetch."""

    def __init__(self, chunk: OffloadedChunk):
        self._chunk = chunk

    def wait(self) -> None:
        """Wait on the host for the shard's step, if it is under way, and let the current stream wait for its copy."""
        self._chunk.arrive()
        self._chunk.use()


def check_device(stored: Sequence[StoredShard], budget: int, device_memory: int | str | None) -> None:
    """Raise `PlanError` where one unsharded chunk, its shard and gradients on their way do not fit."""
    needs = {id(s): _bytes(s.unit.unsharded) + _weight_bytes(s) for s in stored}
    sending = sorted(
        (s.unit.shard.numel() * s.gradients.itemsize for s in stored if s.gradients), reverse=True
    )
    least = max(needs.values()) + sum(sending[:IN_FLIGHT])
    if least > budget:
        largest = max(stored, key=lambda s: needs[id(s)])
        raise PlanError(
            "the device memory is too small for one layer at a time",
            got=f"{budget:,} bytes" + (f" ({device_memory})" if isinstance(device_memory, str) else ""),
            expected=f"more than {least:,} bytes, and room for activations",
            cause=f"the chunk of {largest.unit.chunk.names[0]!r}, unsharded, and {IN_FLIGHT} gradients on their way",
            fix="raise device_memory, shard over more ranks, or compute in a smaller dtype",
        )


def shard_bytes(stored: Sequence[StoredShard], optimizer: torch.optim.Optimizer) -> list[ChunkBytes]:
    """Bytes of a rank's shard of every chunk, stepped by `optimizer`."""
    tensors = state_tensors(optimizer)

    def one(stored: StoredShard) -> ChunkBytes:
        shard, trains = stored.unit.shard, stored.gradients is not None
        return ChunkBytes(
            shard.numel(),
            master=_bytes(shard),
            state=tensors * _bytes(shard) if trains else 0,
            weights=_weight_bytes(stored),
            trains=trains,
            shared=shard.dtype == stored.unit.unsharded.dtype,
            gradient=shard.numel() * stored.gradients.itemsize if stored.gradients is not None else 0,
        )

    return [one(member) for member in stored]


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _weight_bytes(stored: StoredShard) -> int:
    return stored.unit.shard.numel() * stored.unit.unsharded.element_size()
