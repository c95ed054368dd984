"""Tensors that are made of others, as data: stacks, concatenations and slices of them.

Files and models cut the same values differently: a file has each expert of a layer by itself, and the model one tensor
of all of them. What is made of what is a list of regions, so that a rank reads or writes only those that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from cai_mesh.errors import CheckpointError
from cai_mesh.layout.boxes import Box

Item = TypeVar("Item")
SHOWN = 4
"""How many names a message lists."""


@dataclass(frozen=True)
class Part:
    """A region of a tensor that is a region of another, the source.

    Args:
        box: the region of the tensor.
        source: the source's name.
        start: the index in the source at which the region begins.
        axes: the axis of the source for each of the tensor; None: the source has no such axis, and the region is 1
            wide. The region is 1 wide along those of the source that are not here, too.
    """

    box: Box
    source: str
    start: tuple[int, ...]
    axes: tuple[int | None, ...]

    def region(self, inside: Box) -> Box:
        """Return where a region of the box lies in the source."""
        offset, shape = list(self.start), [1] * len(self.start)
        for axis, begin, width, origin in zip(
            self.axes, inside.offset, inside.shape, self.box.offset, strict=True
        ):
            if axis is not None:
                offset[axis] += begin - origin
                shape[axis] = width
        return Box(tuple(offset), tuple(shape))

    def arranged(self, values: torch.Tensor) -> torch.Tensor:
        """Return a view of values of a region of the source that has the tensor's axes."""
        listed = [axis for axis in self.axes if axis is not None]
        dropped = [axis for axis in range(values.dim()) if axis not in listed]
        view = values.permute(listed + dropped)
        for _ in dropped:
            view = view.squeeze(-1)
        for place, axis in enumerate(self.axes):
            if axis is None:
                view = view.unsqueeze(place)
        return view

    def reversed(self, name: str) -> Part:
        """Return the same part as one of the source, made of the tensor `name`."""
        places = {axis: place for place, axis in enumerate(self.axes) if axis is not None}
        axes = tuple(places.get(axis) for axis in range(len(self.start)))
        return Part(self.region(self.box), name, self.box.offset, axes)


@dataclass(frozen=True)
class Assembly:
    """A tensor and the parts that it is made of, which leave nothing out.

    Args:
        shape: the shape of the whole tensor.
        parts: regions of other tensors.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]

    @staticmethod
    def of(source: str, shape: Sequence[int]) -> Assembly:
        """Return another tensor as it is."""
        origin = (0,) * len(shape)
        return Assembly(
            tuple(shape), (Part(Box(origin, tuple(shape)), source, origin, tuple(range(len(shape)))),)
        )

    @property
    def sources(self) -> list[str]:
        """Names of the tensors that it is made of, each once."""
        return list(dict.fromkeys(part.source for part in self.parts))

    def slice(self, axis: int, start: int, stop: int) -> Assembly:
        """Return what lies between two indices along an axis."""
        axis %= len(self.shape)
        shape = _replaced(self.shape, axis, stop - start)
        window = Box(_replaced((0,) * len(self.shape), axis, start), shape)
        parts = []
        for part in self.parts:
            if (inside := part.box.intersect(window)) is not None:
                offset = _replaced(inside.offset, axis, inside.offset[axis] - start)
                begin = part.region(inside).offset
                parts.append(Part(Box(offset, inside.shape), part.source, begin, part.axes))
        return Assembly(shape, tuple(parts))

    def squeeze(self, axis: int) -> Assembly:
        """Return it without an axis along which it is 1 wide."""
        axis %= len(self.shape)
        if self.shape[axis] != 1:
            return self
        return self._with_axes(lambda values, _: _without(values, axis))

    def unsqueeze(self, axis: int) -> Assembly:
        """Return it with one more axis, along which it is 1 wide."""
        axis %= len(self.shape) + 1
        return self._with_axes(lambda values, new: (*values[:axis], new, *values[axis:]))

    def transpose(self, first: int, second: int) -> Assembly:
        """Return it with two axes exchanged."""
        order = list(range(len(self.shape)))
        order[first], order[second] = order[second], order[first]
        return self._with_axes(lambda values, _: tuple(values[place] for place in order))

    def _with_axes(self, change: Callable[[tuple, int | None], tuple]) -> Assembly:
        """The same with other axes: `change` gets what is said of each, and what it is of a new one."""
        parts = tuple(
            Part(
                Box(change(part.box.offset, 0), change(part.box.shape, 1)),
                part.source,
                part.start,
                change(part.axes, None),
            )
            for part in self.parts
        )
        return Assembly(change(self.shape, 1), parts)


def concatenate(tensors: Sequence[Assembly], axis: int) -> Assembly:
    """Return tensors one after another along an axis; raises `CheckpointError` where their shapes do not fit."""
    axis %= len(tensors[0].shape)
    if len({_without(tensor.shape, axis) for tensor in tensors}) > 1:
        first = tensors[0].shape
        other = next(tensor for tensor in tensors if _without(tensor.shape, axis) != _without(first, axis))
        raise CheckpointError(
            "tensors that make one tensor of the model do not fit together",
            got=f"{_names(tensors[0])} of {first}, {_names(other)} of {other.shape}",
        )
    parts: list[Part] = []
    reached = 0
    for tensor in tensors:
        for part in tensor.parts:
            offset = _replaced(part.box.offset, axis, part.box.offset[axis] + reached)
            parts.append(Part(Box(offset, part.box.shape), part.source, part.start, part.axes))
        reached += tensor.shape[axis]
    return Assembly(_replaced(tensors[0].shape, axis, reached), tuple(parts))


def stack(tensors: Sequence[Assembly], axis: int) -> Assembly:
    """Return tensors of one shape along a new axis; raises `CheckpointError` where their shapes differ."""
    return concatenate([tensor.unsqueeze(axis) for tensor in tensors], axis)


def reversed_parts(tensors: Mapping[str, Assembly]) -> dict[str, list[Part]]:
    """Return, for every tensor that these are made of, its parts as regions of these."""
    parts: dict[str, list[Part]] = {}
    for name, tensor in tensors.items():
        for part in tensor.parts:
            parts.setdefault(part.source, []).append(part.reversed(name))
    return parts


def _names(tensor: Assembly) -> str:
    names = tensor.sources
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _replaced(values: tuple[Item, ...], place: int, value: Item) -> tuple[Item, ...]:
    return (*values[:place], value, *values[place + 1 :])


def _without(values: tuple[Item, ...], place: int) -> tuple[Item, ...]:
    return (*values[:place], *values[place + 1 :])
