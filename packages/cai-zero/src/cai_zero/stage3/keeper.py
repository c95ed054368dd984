"""The keepers of stage 3: they answer for the `.grad` of a unit's shards, and of its unsharded parameters.

They refer weakly to what they ask, for the reason that `cai_zero.reduction.owner` gives.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.autograd.graph import increment_version

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, Place, ShardGradient, raw_grad, set_raw_grad
from cai_mesh.layout import record_of, reduce_of
from cai_mesh.storage import FlatUnit
from cai_zero.reduction.owner import GradientOwner, owner_gone
from cai_zero.reduction.ranks import RankTable, groups_along


class ShardKeeper:
    """The `GradientKeeper` of a unit's shards, or of its unsharded parameters."""

    steps = True

    def __init__(
        self,
        owner: GradientOwner,
        ranks: RankTable,
        unit: FlatUnit,
        buffer: GradBuffer,
        *,
        full: bool = False,
    ):
        self._owner, self._weak, self._buffer = weakref.ref(owner), weakref.ref(unit), weakref.ref(buffer)
        self._ranks, self._full = ranks, full
        self.fixed = full
        self._places: dict[int, Place] = {}

    @property
    def _unit(self) -> FlatUnit:
        unit = self._weak()
        if unit is None:
            raise owner_gone()
        return unit

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        owner = self._owner()
        if owner is None:
            return None
        owner.ensure_gradients()
        grad = raw_grad(self._unit.kept[index])
        return None if grad is None else (grad, self.place(index))

    def place(self, index: int) -> Place:
        """The place of this rank's part of the gradient in what users see of it."""
        if self._owner() is None:
            raise owner_gone()
        if index not in self._places:
            self._places[index] = _place_of_shard(self._ranks, self._unit, index, full=self._full)
        return self._places[index]

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        buffer = self._buffer()
        if buffer is not None:
            buffer.drop(index)
        if gradient is not None and buffer is not None:
            buffer.arrived.add(index)
        if gradient is not None and self._full and not isinstance(gradient, ShardGradient):
            raise PlanError(
                "a gradient was put in the place of one of a sharded model, while its parameters are unsharded",
                fix="put it after the backward, when parameters are shards",
            )
        part = gradient.part if isinstance(gradient, ShardGradient) else gradient
        set_raw_grad(self._unit.kept[index], part)

    def leaf(self, index: int) -> nn.Parameter:
        return self._unit.used[index]

    def about_to_write(self, index: int) -> None:
        """Note that what was gathered ahead may soon be old; what is unsharded is, and must be kept."""
        unit = self._weak()
        if unit is None:
            return
        if self._full:
            unit.lent = True
        else:
            increment_version(unit.kept[index])


def _place_of_shard(ranks: RankTable, unit: FlatUnit, index: int, *, full: bool) -> Place:
    """The place of a rank's part of one parameter's gradient: shown as the part, or in full.

    The full one is for who meets an unsharded parameter (between forward and backward, or after an error).
    """
    param = unit.kept[index]
    slices = record_of(param).slices
    assert slices is not None
    part = slices[0]
    sums, complete = groups_along(ranks.mesh, part.axes)
    shard = ranks.of(reduce_of(param)).shard
    shape, bounds = (unit.used[index].shape, part.range) if full else (param.shape, (0, param.numel()))
    return Place(shape, *bounds, shard, sums, not full, not complete, part.axes, part.owner)
