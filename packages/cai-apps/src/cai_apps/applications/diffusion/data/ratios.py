"""Shapes of images: a list of about one number of pixels, and which of them an image is nearest to."""

from __future__ import annotations

import math
from collections.abc import Sequence

Shape = tuple[int, int]
"""Height and width in pixels."""
PARTS = 8
"""A side is a multiple of about this part of the square's."""


def shapes_of(size: int, max_ratio: float, multiple: int) -> list[Shape]:
    """Shapes of at most size x size pixels, and as many as their ratio allows, from the highest to the widest.

    Args:
        size: the side of the square, which is one of them.
        max_ratio: longest side over shortest.
        multiple: the number that every side is a multiple of. Sides grow by the multiple of it that is
            nearest to an eighth of `size`.
    """
    step = multiple * max(1, round(size / PARTS / multiple))
    shapes = {(size, size)}
    longest = int(min(round(size * min(max_ratio, size)), size * size // step))
    for long in range(size // step * step, longest + 1, step):
        short = size * size // long // step * step
        if short and long <= max_ratio * short and long != short:
            shapes |= {(long, short), (short, long)}
    return sorted(shapes, key=lambda shape: shape[1] / shape[0])


def nearest(shape: Shape, shapes: Sequence[Shape]) -> int:
    """The number of the known shape whose ratio is nearest to that of an image."""
    ratio = math.log(shape[1] / shape[0])
    return min(range(len(shapes)), key=lambda i: abs(math.log(shapes[i][1] / shapes[i][0]) - ratio))
