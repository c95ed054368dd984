"""The parts of global parameters that tensors of a param group hold: bookkeeping without arithmetic.

A param group may hold full tensors, tensor-parallel parts (a `Layout` attached), DTensors, flat shards of many
parameters (stages 0 to 2) and shards of one (stage 3). All become `Part`s.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cai_mesh.errors import PlanError
from cai_mesh.layout import Box, BoxedTensor, Layout, Piece, layout_of, record_of, reduce_of


@dataclass(frozen=True, eq=False)
class Part:
    """The part of one parameter that one tensor holds; ranks that hold nothing of it have an empty part of it.

    Args:
        name: canonical name, or None where the tensor does not carry it.
        layout: the layout of the local tensor.
        axes: mesh axes over which the elements of the parameter are divided, without repetition.
        owner: whether this copy is the one that is written to checkpoints.
        start: first element in the tensor, and `range` the elements of the row-major local tensor from there on.
            None where the tensor is the local tensor itself, of its shape.
        pieces: the boxes of a range.
    """

    name: str | None
    layout: Layout
    axes: frozenset[str]
    owner: bool
    start: int | None = None
    range: tuple[int, int] = (0, 0)
    pieces: tuple[Piece, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the global parameter."""
        return self.layout.global_shape

    @property
    def numel(self) -> int:
        """Elements of the global parameter."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Elements this rank holds."""
        return math.prod(self.layout.local_shape) if self.start is None else self.range[1] - self.range[0]

    def segment(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of a tensor laid out as the one in the param group, as a view: 1-d, or of the local shape."""
        if self.start is None:
            return local(tensor)
        return tensor[self.start : self.start + self.held]

    def boxes(self, segment: torch.Tensor) -> list[tuple[Box, torch.Tensor]]:
        """(region of the global parameter, view of exactly that shape) for every box of a segment."""
        if self.start is None:
            return [(box, segment[index]) for index, box in self.layout.slices()]
        return [(piece.box, piece.view(segment)) for piece in self.pieces]

    def boxed(self, segment: torch.Tensor) -> BoxedTensor:
        """A segment as a value for a checkpoint; the pieces are views."""
        return BoxedTensor(self.shape, segment.dtype, tuple(self.boxes(segment)), self.owner)

    def full(self, value: torch.Tensor) -> BoxedTensor:
        """A value in global index space, the same on all ranks that hold the parameter."""
        box = Box((0,) * value.ndim, tuple(value.shape))
        return BoxedTensor(tuple(value.shape), value.dtype, ((box, value),), self.owner)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The local part of a DTensor, sharing its memory; any other tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def parts_of(param: torch.Tensor) -> list[Part]:
    """The parts that a tensor of a param group holds, in an order that is the same on all ranks."""
    slices = record_of(param).slices
    if slices is not None:
        return [_ranged(s.name, s.layout, s.axes, s.owner, s.start, s.range) for s in slices]
    layout = layout_of(param)
    return [Part(None, layout, layout.sharded_axes, reduce_of(param).owner)]


def _ranged(
    name: str | None, layout: Layout, axes: frozenset[str], owner: bool, start: int, bounds: tuple[int, int]
) -> Part:
    return Part(name, layout, axes, owner, start, bounds, tuple(layout.boxes(bounds)))


def check_params(params: Sequence[torch.Tensor], what: str) -> None:
    """Raise `PlanError` for parameters an optimizer of real dense tensors cannot step."""
    for param in params:
        if not param.is_floating_point() or param.dtype.itemsize < 2 or param.layout is not torch.strided:
            raise PlanError(
                f"{what} cannot step a parameter of this kind",
                got=f"{param.dtype}, {param.layout}, shape {tuple(param.shape)}",
                expected="a dense real floating-point tensor of 16 bits or more",
                fix="leave it out of the optimizer, or give it to another",
            )
