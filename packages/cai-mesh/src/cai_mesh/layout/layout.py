"""The places of a local tensor's elements in the global one.

A `Layout` is a global shape and an ordered list of steps. Each step splits (or replicates) what the steps before
left, along one mesh axis. Per dimension the result is a list of segments of the global index range; the local
tensor is the product of those lists, so it is a handful of rectangular boxes of the global tensor.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from cai_mesh.errors import LayoutError
from cai_mesh.layout.boxes import Box, Piece

Segment = tuple[int, int]  # (start in the global dimension, length)


@dataclass(frozen=True)
class Replicate:
    """Every rank of the axis holds the same elements."""


@dataclass(frozen=True)
class Shard:
    """Dimension `dim` is cut into contiguous parts, one a rank, the first ranks taking the larger ones.

    Args:
        dim: dimension of the tensor, not negative.
        sections: lengths of blocks packed side by side along `dim` of the global tensor (q|k|v, gate|up); each is
            cut separately and a rank holds its part of every one.
        unit: cuts fall on multiples of this many elements (the size of a head, say).

    With one section and unit 1 this is `torch.chunk`, and so a DTensor's `Shard`.
    """

    dim: int
    sections: tuple[int, ...] | None = None
    unit: int = 1


@dataclass(frozen=True)
class Step:
    """One placement along one mesh axis: this rank is number `index` of `degree`."""

    axis: str
    degree: int
    index: int
    placement: Shard | Replicate

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.degree:
            raise LayoutError(
                f"index along axis {self.axis!r} is out of range",
                got=self.index,
                expected=f"0 to {self.degree - 1}",
            )


@dataclass(frozen=True)
class Layout:
    """Global shape and ordered steps of one rank's local tensor."""

    global_shape: tuple[int, ...]
    steps: tuple[Step, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "global_shape", tuple(int(n) for n in self.global_shape))
        for step in self.steps:
            if isinstance(step.placement, Shard):
                self._check(step.placement)

    def _check(self, shard: Shard) -> None:
        if not 0 <= shard.dim < len(self.global_shape):
            raise LayoutError(
                "a shard names a dimension the tensor does not have",
                got=f"dim {shard.dim}",
                expected=f"0 to {len(self.global_shape) - 1} for shape {self.global_shape}",
            )
        size = self.global_shape[shard.dim]
        if shard.sections is not None and sum(shard.sections) != size:
            raise LayoutError(
                "the sections of a shard do not fill its dimension",
                got=f"{shard.sections}, sum {sum(shard.sections)}",
                expected=f"sum {size} for shape {self.global_shape}",
            )
        if shard.unit < 1:
            raise LayoutError("the unit of a shard is not positive", got=shard.unit)

    def then(self, axis: str, degree: int, index: int, placement: Shard | Replicate) -> Layout:
        """This layout with one more step."""
        return replace(self, steps=(*self.steps, Step(axis, degree, index, placement)))

    def across(self, axes: Sequence[tuple[str, int, int]], placement: Shard | Replicate) -> Layout:
        """This layout with one placement over several axes, as if over one whose ranks are theirs in row-major order.

        Args:
            axes: (name, degree, index), outermost first.

        Raises `LayoutError` where a cut of unequal sections leaves unequal parts.
        """
        layout, remaining = self, math.prod(degree for _, degree, _ in axes)
        part = self._part_of(placement, remaining) if isinstance(placement, Shard) else None
        for axis, degree, index in axes:
            remaining //= degree
            step = placement
            if part is not None and isinstance(placement, Shard):
                step = replace(placement, unit=part * remaining)
            layout = layout.then(axis, degree, index, step)
        return layout

    def _part_of(self, shard: Shard, degree: int) -> int | None:
        """Elements of each of `degree` parts of a section, where cuts one by one must be told of it; else None."""
        lengths = [sum(n for _, n in self.segments(shard.dim))] if shard.sections is None else shard.sections
        if all(length % (shard.unit * degree) == 0 for length in lengths):
            return None
        if len(set(lengths)) > 1:
            raise LayoutError(
                "sections of different lengths do not divide over several axes",
                got=f"{shard.sections} over {degree} ranks",
                expected=f"multiples of {shard.unit * degree}",
            )
        return -(-lengths[0] // (shard.unit * degree)) * shard.unit

    def at(self, indices: Mapping[str, int]) -> Layout:
        """The layout of the rank at `indices` (mesh axis to index; axes that are not named keep this rank's)."""
        return replace(self, steps=tuple(replace(s, index=indices.get(s.axis, s.index)) for s in self.steps))

    @property
    def sharded_axes(self) -> frozenset[str]:
        """Axes along which ranks hold different elements."""
        return frozenset(s.axis for s in self.steps if s.degree > 1 and isinstance(s.placement, Shard))

    def segments(self, dim: int) -> list[Segment]:
        """Global index ranges of dimension `dim` that this rank holds, in local order."""
        segments: list[Segment] = [(0, self.global_shape[dim])]
        for step in self.steps:
            if isinstance(step.placement, Shard) and step.placement.dim == dim:
                segments = _split(segments, step.placement, step.degree, step.index)
        return segments

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of the local tensor, storage padding not counted."""
        return tuple(sum(n for _, n in self.segments(d)) for d in range(len(self.global_shape)))

    def slices(self) -> list[tuple[tuple[slice, ...], Box]]:
        """Rectangular parts of the local tensor: (index in it, region of the global tensor)."""
        per_dim = []
        for dim in range(len(self.global_shape)):
            starts = itertools.accumulate((n for _, n in self.segments(dim)), initial=0)
            per_dim.append(
                [
                    (slice(at, at + n), g, n)
                    for at, (g, n) in zip(starts, self.segments(dim), strict=False)
                    if n
                ]
            )
        return [
            (tuple(s for s, _, _ in parts), Box(tuple(g for _, g, _ in parts), tuple(n for _, _, n in parts)))
            for parts in itertools.product(*per_dim)
        ]

    def boxes(self, flat_range: tuple[int, int] | None = None) -> list[Piece]:
        """Boxes of elements `flat_range` (default all) of the flattened row-major local tensor.

        The `start` of a piece counts from the beginning of the range. A range is a partial first row, whole rows
        and a partial last row, recursively, each cut where the segments of the layout end.
        """
        shape = self.local_shape
        low, high = flat_range if flat_range is not None else (0, math.prod(shape))
        if not 0 <= low <= high <= math.prod(shape):
            raise LayoutError(
                "a flat range lies outside its tensor",
                got=(low, high),
                expected=f"within 0 to {math.prod(shape)}",
            )
        segments = [self.segments(d) for d in range(len(shape))]
        stride = tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))
        return [
            Piece(
                _global_box(local, segments),
                sum(o * s for o, s in zip(local.offset, stride, strict=True)) - low,
                stride,
            )
            for region in _rows(shape, low, high)
            for local in _cut_at_segments(region, segments)
        ]


def _split(segments: list[Segment], shard: Shard, degree: int, index: int) -> list[Segment]:
    bounds = list(itertools.accumulate(shard.sections or (), initial=0)) if shard.sections else [0, 1 << 62]
    rank_segments: list[Segment] = []
    for low, high in itertools.pairwise(bounds):
        part = [(max(s, low), min(s + n, high) - max(s, low)) for s, n in segments]
        part = [(s, n) for s, n in part if n > 0]
        length = sum(n for _, n in part)
        size = -(-length // (shard.unit * degree)) * shard.unit
        rank_segments += _take(part, min(index * size, length), min((index + 1) * size, length))
    return rank_segments


def _take(segments: list[Segment], low: int, high: int) -> list[Segment]:
    part, at = [], 0
    for start, length in segments:
        a, b = max(low - at, 0), min(high - at, length)
        if a < b:
            part.append((start + a, b - a))
        at += length
    return part


def _rows(shape: tuple[int, ...], low: int, high: int) -> list[Box]:
    """Boxes of a local tensor that tile elements [low, high), in order, each contiguous."""
    if low >= high:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = low // row, (high - 1) // row
    if first == last:
        inner = _rows(shape[1:], low - first * row, high - first * row)
        return [Box((first, *b.offset), (1, *b.shape)) for b in inner]
    head_end = (first + 1) * row if low % row else low
    tail_start = last * row if high % row else high
    boxes = _rows(shape, low, head_end)
    if head_end < tail_start:
        boxes.append(
            Box((head_end // row, *(0 for _ in shape[1:])), ((tail_start - head_end) // row, *shape[1:]))
        )
    return boxes + _rows(shape, tail_start, high)


def _cut_at_segments(region: Box, segments: list[list[Segment]]) -> list[Box]:
    parts = [
        _pieces_of(segments[d], o, n)
        for d, (o, n) in enumerate(zip(region.offset, region.shape, strict=True))
    ]
    return [Box(tuple(o for o, _ in part), tuple(n for _, n in part)) for part in itertools.product(*parts)]


def _pieces_of(segments: list[Segment], low: int, length: int) -> list[Segment]:
    pieces, at = [], 0
    for _, n in segments:
        a, b = max(low, at), min(low + length, at + n)
        if a < b:
            pieces.append((a, b - a))
        at += n
    return pieces


def _global_box(local: Box, segments: list[list[Segment]]) -> Box:
    return Box(tuple(_to_global(segments[d], o) for d, o in enumerate(local.offset)), local.shape)


def _to_global(segments: list[Segment], position: int) -> int:
    for start, length in segments:
        if position < length:
            return start + position
        position -= length
    raise LayoutError("a local position lies outside its tensor", got=position)
