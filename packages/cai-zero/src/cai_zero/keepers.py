"""Who answers for the `.grad` of sharded parameters: keepers of chunks, of their pieces, and of units of stage 3."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.autograd.graph import increment_version

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, Place, ShardGradient, raw_grad, set_raw_grad
from cai_mesh.layout import record_of, reduce_of
from cai_mesh.storage import FlatUnit
from cai_zero.chunks import Chunk
from cai_zero.ranks import RankTable, groups_along

if TYPE_CHECKING:
    from cai_zero.module import ModuleSharding
    from cai_zero.optimizer import ShardedOptimizer


class ChunkKeeper:
    """The `GradientKeeper` of a chunk's parameters."""

    def __init__(self, owner: ShardedOptimizer, chunk: Chunk):
        self._owner, self._chunk = weakref.ref(owner), chunk

    def place(self, index: int) -> Place:
        return self._chunk.places[index]

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        owner, chunk = self._owner(), self._chunk
        if owner is None or not owner.has_gradients():
            return None
        owner.ensure_gradients()
        assert chunk.flat.grad is not None and chunk.absent is not None
        if index in chunk.absent:
            return None
        return chunk.of(index, chunk.flat.grad), self.place(index)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        owner = self._owner()
        if owner is not None:
            owner.put_gradient(self._chunk, index, gradient)

    def leaf(self, index: int) -> nn.Parameter:
        return self._chunk.params[index]

    def about_to_write(self, index: int) -> None:
        """What is written to a parameter is there; its master weights take it before the next step."""
        self._chunk.lent.add(index)


class PieceKeeper(ChunkKeeper):
    """The same for the parts that the optimizer steps: a gradient is shown as its part."""

    def place(self, index: int) -> Place:
        whole, size = self._chunk.places[index], self._chunk.pieces[index].numel()
        return replace(whole, shape=torch.Size((size,)), low=0, high=size, local=True)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None and not isinstance(gradient, ShardGradient):
            gradient = ShardGradient(gradient.detach(), self.place(index))
        super().set_gradient(index, gradient)

    def about_to_write(self, index: int) -> None:
        """What is written here is written to the master weights themselves."""


class ShardKeeper:
    """The `GradientKeeper` of a unit's shards, or of its unsharded parameters."""

    def __init__(self, sharding: ModuleSharding, unit: FlatUnit, buffer: GradBuffer, *, whole: bool = False):
        self._sharding, self._unit, self._buffer = weakref.ref(sharding), unit, buffer
        self._whole = whole
        self._places: dict[int, Place] = {}

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        sharding = self._sharding()
        if sharding is not None:
            sharding.agree()
        grad = raw_grad(self._unit.kept[index])
        if grad is None or sharding is None:
            return None
        return grad, self.place(index)

    def place(self, index: int) -> Place:
        """Where this rank's part of the gradient lies in what users see of it."""
        sharding = self._sharding()
        assert sharding is not None
        if index not in self._places:
            self._places[index] = _place_of_shard(sharding.ranks, self._unit, index, whole=self._whole)
        return self._places[index]

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        self._buffer.drop(index)
        if gradient is not None:
            self._buffer.arrived.add(index)
        if gradient is not None and self._whole and not isinstance(gradient, ShardGradient):
            raise PlanError(
                "a gradient was put in the place of one of a sharded model, while its parameters are unsharded",
                fix="put it after the backward, when parameters are shards",
            )
        part = gradient.part if isinstance(gradient, ShardGradient) else gradient
        set_raw_grad(self._unit.kept[index], part)

    def leaf(self, index: int) -> nn.Parameter:
        return self._unit.used[index]

    def about_to_write(self, index: int) -> None:
        """What was gathered ahead of the next forward may soon be old."""
        increment_version(self._unit.kept[index])


def _place_of_shard(ranks: RankTable, unit: FlatUnit, index: int, *, whole: bool) -> Place:
    """What a rank's part of one parameter's gradient is shown as: as the part, or as the whole.

    The whole is for who meets an unsharded parameter (between forward and backward, or after an error).
    """
    param = unit.kept[index]
    slices = record_of(param).slices
    assert slices is not None
    part = slices[0]
    sums, known = groups_along(ranks.mesh, part.axes)
    shard = ranks.of(reduce_of(param)).shard
    shape, bounds = (unit.used[index].shape, part.range) if whole else (param.shape, (0, param.numel()))
    return Place(shape, *bounds, shard, sums, not whole, not known, part.axes, part.owner)
