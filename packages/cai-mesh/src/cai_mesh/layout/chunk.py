"""A group of parameters in one contiguous buffer."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from cai_mesh.errors import LayoutError
from cai_mesh.layout.boxed import BoxedTensor
from cai_mesh.layout.layout import Layout
from cai_mesh.layout.record import layout_of

ALIGNMENT = 128
"""Elements; at least 128 bytes in every dtype, so a chunk has one set of offsets for all its precisions."""


@dataclass(frozen=True)
class Slot:
    """The place of one parameter in a chunk."""

    name: str
    layout: Layout
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


@dataclass(frozen=True)
class Overlap:
    """The part of a slot inside a flat range: elements `low:high` of the parameter, at `start` of the range."""

    slot: Slot
    low: int
    high: int
    start: int


def moved(name: str) -> LayoutError:
    """The error for a parameter that was taken out of its chunk."""
    return LayoutError(
        f"parameter {name!r} does not lie in its chunk any more",
        cause="the model was moved, cast or given other parameters after it was sharded (model.to, .half, .cuda, "
        "load_state_dict(assign=True), or a trainer that does so)",
        fix="move, cast and load the model first, then shard it",
    )


class FlatChunk:
    """Offsets of a list of parameters in one buffer, and views of tensors laid out so.

    Args:
        params: (canonical name, local parameter) pairs, in storage order. Only shapes and layouts are read; a meta
            tensor is fine.
        world: number of equal shards the chunk is cut into. Its length is a multiple of `world * ALIGNMENT`.
        align: elements to which every parameter's offset is rounded up.
    """

    def __init__(self, params: Iterable[tuple[str, torch.Tensor]], *, world: int = 1, align: int = ALIGNMENT):
        if align % ALIGNMENT or align < 1:
            raise LayoutError(
                "a chunk's alignment is not a multiple of its base", got=align, expected=f"k x {ALIGNMENT}"
            )
        slots, at = [], 0
        for name, param in params:
            slots.append(Slot(name, layout_of(param), tuple(param.shape), at))
            at = -(-(at + param.numel()) // align) * align
        self.slots: tuple[Slot, ...] = tuple(slots)
        self.world = world
        unit = world * align
        self.numel = max(-(-at // unit), 1) * unit
        self._offsets = [slot.offset for slot in slots]
        ends = [0, *(slot.end for slot in slots)]
        self._gaps = [
            (low, high) for low, high in zip(ends, [*self._offsets, self.numel], strict=True) if low < high
        ]

    @property
    def names(self) -> tuple[str, ...]:
        """Canonical parameter names in storage order."""
        return tuple(slot.name for slot in self.slots)

    @property
    def shard_numel(self) -> int:
        """Elements of one rank's shard."""
        return self.numel // self.world

    def shard_range(self, index: int) -> tuple[int, int]:
        """Element range of shard `index`."""
        return index * self.shard_numel, (index + 1) * self.shard_numel

    def allocate(self, dtype: torch.dtype, device: torch.device | str, *, zero: bool = False) -> torch.Tensor:
        """A buffer of the unsharded chunk, shape [numel]. Padding is zero either way."""
        if zero:
            return torch.zeros(self.numel, dtype=dtype, device=device)
        buffer = torch.empty(self.numel, dtype=dtype, device=device)
        self.clear_padding(buffer)
        return buffer

    def clear_padding(self, buffer: torch.Tensor) -> None:
        """Zero what lies between and after the parameters in a buffer of the unsharded chunk."""
        for low, high in self._gaps:
            buffer[low:high].zero_()

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """One view per slot of a buffer of the unsharded chunk, each of its parameter's shape."""
        return [buffer[s.offset : s.end].view(s.shape) for s in self.slots]

    def fill(self, buffer: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
        """Copy parameters, in storage order, into a buffer."""
        for view, param in zip(self.views(buffer), params, strict=True):
            view.copy_(param.detach())

    def check_views(self, buffer: torch.Tensor, params: Sequence[torch.Tensor]) -> None:
        """Raise `LayoutError` where a parameter is no longer the view of `buffer` it was made: it has been moved."""
        start, size = buffer.data_ptr(), buffer.element_size()
        for slot, param in zip(self.slots, params, strict=True):
            if slot.numel and (param.data_ptr() != start + slot.offset * size or param.dtype != buffer.dtype):
                raise moved(slot.name)

    def overlaps(self, low: int, high: int) -> list[Overlap]:
        """The parts of parameters inside elements [low, high) of the chunk; padding left out."""
        overlaps = []
        for slot in self.slots[max(bisect.bisect_right(self._offsets, low) - 1, 0) :]:
            if slot.offset >= high:
                break
            a, b = max(low, slot.offset), min(high, slot.end)
            if a < b:
                overlaps.append(Overlap(slot, a - slot.offset, b - slot.offset, a - low))
        return overlaps

    def boxed(self, flat: torch.Tensor, low: int) -> dict[str, BoxedTensor]:
        """Return the contents of elements [low, low + len), by parameter name, as boxes of the global tensors.

        The pieces are views, so loading into them fills `flat`.
        """
        return {
            part.slot.name: BoxedTensor.from_flat(
                part.slot.layout, (part.low, part.high), flat[part.start : part.start + part.high - part.low]
            )
            for part in self.overlaps(low, low + flat.numel())
        }
