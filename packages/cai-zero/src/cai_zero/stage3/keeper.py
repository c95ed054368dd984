"""The keepers of stage 3: they answer for the `.grad` of a unit's shards, and of its unsharded parameters.

They refer weakly to what they ask, for the reason that `cai_zero.reduction.owner` gives.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn
from torch.autograd.graph import increment_version

from cai_mesh.comm import all_reduce
from cai_mesh.errors import LayoutError, PlanError
from cai_mesh.gradients import GradBuffer, Place, ShardGradient, local_gradient, raw_grad, set_raw_grad
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
        buffer: GradBuffer | None,
        *,
        full: bool = False,
    ):
        self._owner, self._weak = weakref.ref(owner), weakref.ref(unit)
        self._buffer = (lambda: None) if buffer is None else weakref.ref(buffer)
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
        shard = self._unit.kept[index]
        # a residency keeps its own
        grad = local_gradient(shard) if hasattr(shard, "cai_flat") else raw_grad(shard)
        return None if grad is None else (grad, self.place(index))

    def place(self, index: int) -> Place:
        """The place of this rank's part of the gradient in what users see of it."""
        if self._owner() is None:
            raise owner_gone()
        if index not in self._places:
            self._places[index] = _place_of_shard(self._ranks, self._unit, index)
        return self._places[index]

    @torch.no_grad()
    def share_of(self, index: int, gradient: torch.Tensor) -> torch.Tensor:
        """This rank's part of a gradient that a loop puts in place: a shown one, or one of each rank to be averaged.

        Collective for the latter. Raises `LayoutError` for one of another shape.
        """
        place = self.place(index)
        if gradient.shape != place.shape:
            raise LayoutError(
                "a gradient does not have the shape of its parameter",
                got=tuple(gradient.shape),
                expected=tuple(place.shape),
            )
        if isinstance(gradient, ShardGradient):
            return gradient.part
        param = self._unit.kept[index]
        ranks, full = self._ranks.of(reduce_of(param)), gradient.detach()
        if ranks.count > 1:
            full = full.clone(memory_format=torch.contiguous_format)
            for group in (ranks.copies, ranks.shard):
                all_reduce(full, group)
            full.div_(ranks.divisor)
        return full.flatten()[place.low : place.high].to(param.device, param.dtype)

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
        shard = self._unit.kept[index]
        if hasattr(shard, "cai_flat"):
            shard.grad = gradient
        else:
            set_raw_grad(shard, None if gradient is None else self.share_of(index, gradient))

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


def _place_of_shard(ranks: RankTable, unit: FlatUnit, index: int) -> Place:
    """The place of a rank's part of one parameter, and of its gradient, in the whole."""
    param = unit.kept[index]
    slices = record_of(param).slices
    assert slices is not None
    part = slices[0]
    sums, complete = groups_along(ranks.mesh, part.axes)
    shape, shard = unit.used[index].shape, ranks.of(reduce_of(param)).shard
    return Place(shape, *part.range, shard, sums, beyond=not complete, axes=part.axes, owner=part.owner)
