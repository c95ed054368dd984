"""Rectangular regions of a global tensor, and where they lie in flat storage."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Box:
    """A rectangular region of a global tensor."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def slices(self) -> tuple[slice, ...]:
        """Index of this region in the global tensor."""
        return tuple(slice(o, o + n) for o, n in zip(self.offset, self.shape, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """The common region, or None."""
        low = tuple(max(a, b) for a, b in zip(self.offset, other.offset, strict=True))
        ends = zip(self.offset, self.shape, other.offset, other.shape, strict=True)
        shape = tuple(min(a + n, b + m) - o for (a, n, b, m), o in zip(ends, low, strict=True))
        return None if any(n <= 0 for n in shape) else Box(low, shape)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this region in a tensor that holds exactly `outer`."""
        return tuple(
            slice(o - p, o - p + n) for o, n, p in zip(self.offset, self.shape, outer.offset, strict=True)
        )


@dataclass(frozen=True)
class Piece:
    """A box of the global tensor inside a flat local storage: element `start`, then `stride` elements a dimension."""

    box: Box
    start: int
    stride: tuple[int, ...]

    def view(self, flat: torch.Tensor) -> torch.Tensor:
        """The box as a view of the 1-d tensor that holds the flat range."""
        return flat.as_strided(self.box.shape, self.stride, flat.storage_offset() + self.start)
