"""Layouts of DTensors, both ways."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch.distributed.tensor as dt
from torch.distributed.tensor.placement_types import _StridedShard

from cai_mesh.comm.mesh import axis_names
from cai_mesh.errors import LayoutError
from cai_mesh.layout.layout import Layout, Replicate, Shard, Step


def layout_of_dtensor(tensor: dt.DTensor) -> Layout:
    """The layout of a DTensor's local part. Raises `LayoutError` for partial values."""
    mesh = tensor.device_mesh
    names = axis_names(mesh)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError("this rank is not part of the DTensor's mesh", got=mesh)
    steps: list[Step] = []
    for i, placement in enumerate(tensor.placements):
        if placement.is_partial():
            raise LayoutError(
                "a DTensor holds partial sums, which no layout describes", got=tensor.placements
            )
        step = Step(names[i], mesh.size(i), coordinate[i], _own_placement(placement))
        if isinstance(placement, _StridedShard):
            raise_if_unordered(tensor.placements, i)
        steps.append(step)
    return Layout(tuple(tensor.shape), tuple(_in_cutting_order(tensor.placements, steps)))


def _own_placement(placement: dt.Placement) -> Shard | Replicate:
    if isinstance(placement, (dt.Shard, _StridedShard)):
        return Shard(placement.dim)
    return Replicate()


def raise_if_unordered(placements: Sequence[dt.Placement], i: int) -> None:
    """A strided shard must be what results from cutting along later mesh dimensions first."""
    strided = placements[i]
    later = [
        p for p in placements[i + 1 :] if isinstance(p, (dt.Shard, _StridedShard)) and p.dim == strided.dim
    ]
    if not later:
        raise LayoutError(
            "a strided shard has no later mesh dimension that explains its stride", got=tuple(placements)
        )


def _in_cutting_order(placements: Sequence[dt.Placement], steps: list[Step]) -> list[Step]:
    """Strided shards are cut after every later mesh dimension that shards the same tensor dimension."""
    order: list[Step] = []
    for placement, step in reversed(list(zip(placements, steps, strict=True))):
        order = [*order, step] if isinstance(placement, _StridedShard) else [step, *order]
    return order


def placements_of(layout: Layout, axes: Sequence[str]) -> list[dt.Placement]:
    """DTensor placements over mesh dimensions `axes`, exact or a `LayoutError`."""
    by_axis: dict[str, list[tuple[int, Step]]] = {}
    for position, step in enumerate(layout.steps):
        if step.degree > 1 and isinstance(step.placement, Shard):
            by_axis.setdefault(step.axis, []).append((position, step))
    for axis, steps in by_axis.items():
        if axis not in axes or len(steps) > 1:
            raise LayoutError(
                f"a DTensor over {tuple(axes)} cannot say how axis {axis!r} is used", got=layout.steps
            )
    placements: list[dt.Placement] = []
    for i, axis in enumerate(axes):
        if axis not in by_axis:
            placements.append(dt.Replicate())
            continue
        position, step = by_axis[axis][0]
        inner = [by_axis[a][0] for a in axes[i + 1 :] if a in by_axis]
        placements.append(_placement(layout, position, step, inner))
    return placements


def _placement(layout: Layout, position: int, step: Step, inner: list[tuple[int, Step]]) -> dt.Placement:
    shard = step.placement
    assert isinstance(shard, Shard)
    if shard.sections is not None or shard.unit != 1:
        raise LayoutError(
            "a DTensor has no packed sections or units", got=shard, fix="save the tensor as boxes instead"
        )
    earlier = [
        s
        for at, s in inner
        if at < position and isinstance(s.placement, Shard) and s.placement.dim == shard.dim
    ]
    same_dim = [s for _, s in inner if isinstance(s.placement, Shard) and s.placement.dim == shard.dim]
    if not earlier:
        return dt.Shard(shard.dim)
    cut_before = math.prod(s.degree for s in earlier)
    if len(earlier) != len(same_dim) or layout.global_shape[shard.dim] % (cut_before * step.degree):
        raise LayoutError(
            "a DTensor cannot say this order of cuts exactly",
            got=layout.steps,
            cause="an outer mesh dimension is cut after inner ones, unevenly or in between",
        )
    return _StridedShard(shard.dim, split_factor=cut_before)
