"""Row and column statistics of matrices held as boxes: the arithmetic (communication is in `sums`).

A tensor [..., R, C] has rows [..., R] and columns [..., C], in global index space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from cai_mesh.layout import Box

Boxes = Iterable[tuple[Box, torch.Tensor]]


def is_factored(shape: tuple[int, ...]) -> bool:
    """Whether a parameter of this global shape has rows and columns."""
    return len(shape) >= 2


def row_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., R]."""
    return shape[:-1]


def column_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """[..., C]."""
    return (*shape[:-2], shape[-1])


def factored_numel(shape: tuple[int, ...]) -> int:
    """Elements of rows and columns together."""
    return math.prod(row_shape(shape)) + math.prod(column_shape(shape))


def square_sums_of(boxes: Boxes, shape: tuple[int, ...], out: torch.Tensor) -> torch.Tensor:
    """Add the sums of squares of rows and columns inside the boxes to `out` [factored_numel(shape)]; returns it."""
    rows, columns = split(out, shape)
    for box, values in boxes:
        where = box.slices()
        rows[where[:-1]] += torch.linalg.vector_norm(values, dim=-1).square()
        columns[(*where[:-2], where[-1])] += torch.linalg.vector_norm(values, dim=-2).square()
    return out


def split(sums: torch.Tensor, shape: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of rows [..., R] and columns [..., C] of a 1-d tensor that holds both."""
    rows = math.prod(row_shape(shape))
    return sums[:rows].view(row_shape(shape)), sums[rows:].view(column_shape(shape))


def advance(
    rows: torch.Tensor,
    columns: torch.Tensor,
    sums: torch.Tensor,
    shape: tuple[int, ...],
    weight: float,
    eps: float,
) -> None:
    """Move the running means of rows and columns by `weight` towards the means of squares plus `eps`."""
    fresh_rows, fresh_columns = split(sums, shape)
    rows.lerp_(fresh_rows / shape[-1] + eps, weight)
    columns.lerp_(fresh_columns / shape[-2] + eps, weight)


def estimate(rows: torch.Tensor, columns: torch.Tensor, box: Box, floor: float) -> torch.Tensor:
    """The rank-one estimate of the mean squares inside a box: rows ⊗ columns / mean of the rows (at least `floor`).

    Returns a new tensor of the box's shape.
    """
    where = box.slices()
    mean = rows.mean(-1, keepdim=True).clamp_(min=floor)
    scaled = (rows / mean)[where[:-1]]
    return scaled.unsqueeze(-1) * columns[(*where[:-2], where[-1])].unsqueeze(-2)
