"""The keepers of stages 0 to 2: they answer for the `.grad` of parameters in chunks, and of those in none.

They refer weakly to what they ask, for the reason that `cai_zero.reduction.owner` gives.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from cai_mesh.comm import all_reduce
from cai_mesh.errors import LayoutError, PlanError
from cai_mesh.gradients import (
    Place,
    ShardGradient,
    ShownParameter,
    is_kept,
    raw_grad,
    set_raw_grad,
)
from cai_mesh.layout import layout_of, reduce_of
from cai_zero.reduction.owner import GradientOwner, owner_gone
from cai_zero.reduction.ranks import RankTable, groups_along
from cai_zero.replicated.chunks import Chunk


class ChunkOwner(GradientOwner, Protocol):
    """Whoever has the chunks of some parameters and steps their pieces."""

    def has_gradients(self) -> bool:
        """Whether anything has arrived since the gradients were last dropped, as far as this rank knows."""
        ...

    def reopen(self) -> None:
        """Reduce again: a gradient of this rank has been put where autograd accumulates."""

    def admit(self) -> None:
        """Take into chunks what is to be trained and lies in none."""

    def publish(self, only: Chunk | None = None) -> None:
        """Give every rank the parameters of one chunk, or all, whose master weights have been written to."""


class ChunkKeeper:
    """The `GradientKeeper` of a chunk's parameters."""

    steps = True

    def __init__(self, owner: ChunkOwner, chunk: Chunk):
        self._owner, self._weak = weakref.ref(owner), weakref.ref(chunk)

    @property
    def _chunk(self) -> Chunk:
        chunk = self._weak()
        if chunk is None:
            raise owner_gone()
        return chunk

    def place(self, index: int) -> Place:
        return self._chunk.places[index]

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        owner = self._owner()
        if owner is None or not owner.has_gradients():
            return None
        owner.ensure_gradients()
        part = self._chunk.gradients.part(index)
        return None if part is None else (part, self.place(index))

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Take another gradient for the coming step: none; one that was shown; or one of this rank, to be reduced.

        With parameters on one rank the last two are the same. Raises `LayoutError` for one of another shape.
        """
        owner = self._owner()
        if owner is None:
            return
        chunk, param = self._chunk, self._chunk.params[index]
        if gradient is None:
            chunk.gradients.drop(index)
        elif isinstance(gradient, ShardGradient):
            owner.ensure_gradients()
            chunk.gradients.put(index, gradient.part)
        elif gradient.shape != param.shape:
            raise LayoutError(
                "a gradient does not have the shape of its parameter",
                got=tuple(gradient.shape),
                expected=tuple(param.shape),
            )
        else:
            chunk.gradients.drop(index)
            set_raw_grad(param, gradient.detach().to(param.device, param.dtype))
            owner.reopen()

    def leaf(self, index: int) -> nn.Parameter:
        return self._chunk.params[index]

    def piece(self, index: int) -> nn.Parameter:
        """This rank's part of parameter `index`, which an optimizer steps."""
        return self._chunk.weights.pieces[index]

    def about_to_write(self, index: int) -> None:
        """Leave what is written to a parameter there; its master weights take it before the next step."""
        chunk = self._weak()
        if chunk is not None:
            chunk.weights.wait_gathered()
            chunk.weights.join()
            chunk.weights.lent.add(index)

    def wait_for_values(self) -> None:
        """Return once the parameters are those of the last step."""
        self._chunk.weights.wait_gathered()


class FrozenKeeper:
    """The same for a parameter that lies in no chunk, until it is to be trained: then its chunk's keeper answers."""

    steps = True

    def __init__(self, owner: ChunkOwner, param: nn.Parameter):
        self._owner, self._param = weakref.ref(owner), weakref.ref(param)

    def _successor(self, *, with_gradient: torch.Tensor | None = None) -> tuple[ChunkKeeper, int] | None:
        """The keeper that answers, and its index there, if the parameter is to be trained by now."""
        owner, param = self._owner(), self._param()
        if owner is None or not isinstance(param, ShownParameter):
            return None
        if with_gradient is not None:
            set_raw_grad(param, with_gradient)
        owner.admit()
        keeper = param.cai_keeper
        return (keeper, param.cai_index) if isinstance(keeper, ChunkKeeper) else None

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        successor = self._successor()
        return None if successor is None else successor[0].held(successor[1])

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            self._successor(with_gradient=gradient.detach())

    def leaf(self, index: int) -> nn.Parameter:
        param = self._param()
        assert param is not None
        return param

    def about_to_write(self, index: int) -> None:
        """It has no copy that would have to follow."""


class StrayKeeper:
    """The same for a parameter of the model that the optimizer does not have: it may be clipped with the others.

    Nobody reduces its gradient but who reads it. What is read is the average; backwards after that add this rank's, and
    the average of both is that of all.
    """

    steps = False

    def __init__(self, ranks: RankTable, param: nn.Parameter):
        self._ranks, self._param = ranks, weakref.ref(param)

    def leaf(self, index: int) -> nn.Parameter:
        param = self._param()
        assert param is not None
        return param

    def held(self, index: int) -> tuple[torch.Tensor, Place] | None:
        param = self.leaf(index)
        if not param.requires_grad and raw_grad(param) is None:
            return None
        self._average(param)
        grad, axes = raw_grad(param), layout_of(param).sharded_axes
        if grad is None:
            return None
        if not grad.is_contiguous():  # what is written to the flat one must be written to this one
            grad = grad.contiguous()
            set_raw_grad(param, grad)
        sums, complete = groups_along(self._ranks.mesh, axes)
        place = Place(
            param.shape,
            0,
            param.numel(),
            sums=sums,
            beyond=not complete,
            axes=axes,
            owner=reduce_of(param).owner,
        )
        return grad.flatten(), place

    @torch.no_grad()
    def _average(self, param: nn.Parameter) -> None:
        """Let the gradient be that of all ranks, if any has one."""
        ranks, grad = self._ranks.of(reduce_of(param)), raw_grad(param)
        if ranks.partial is not None:
            raise PlanError(
                "a gradient was read of a parameter that the optimizer does not have",
                cause="tensor parallel ranks have parts of it, which nobody sums",
                fix="give the parameter to the optimizer, or freeze it",
            )
        if ranks.count == 1:
            return
        arrived = torch.tensor(float(grad is not None), device=param.device)
        for group in (ranks.copies, ranks.shard):
            all_reduce(arrived, group, op="max")
        if not arrived:
            return
        average = torch.zeros_like(param) if grad is None else grad.to_dense().contiguous()
        for group in (ranks.copies, ranks.shard):
            all_reduce(average, group)
        set_raw_grad(param, average.div_(ranks.divisor))

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        param = self.leaf(index)
        plain = gradient.whole() if isinstance(gradient, ShardGradient) else gradient
        set_raw_grad(param, None if plain is None else plain.detach())

    def about_to_write(self, index: int) -> None:
        """It has no copy that would have to follow."""


def show_others(
    owner: ChunkOwner, waiting: Iterable[nn.Parameter], model: nn.Module | None, ranks: RankTable
) -> None:
    """Let parameters in no chunk show their gradients: those that wait, and those of the model that nobody steps."""
    for param in waiting:
        ShownParameter.adopt(param, FrozenKeeper(owner, param), 0)
    for param in model.parameters() if model is not None else ():
        if not is_kept(param):
            ShownParameter.adopt(param, StrayKeeper(ranks, param), 0)
