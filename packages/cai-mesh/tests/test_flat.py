"""Chunks: alignment, views, and flat ranges that rebuild every parameter exactly."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import LayoutError
from cai_mesh.layout import FlatChunk, Layout, Shard, attach

shapes = st.lists(st.lists(st.integers(0, 9), min_size=0, max_size=3).map(tuple), min_size=0, max_size=5)


def named(shapes_):
    return [(f"p{i}", torch.empty(shape)) for i, shape in enumerate(shapes_)]


def numbered(shapes_):
    """Parameters whose elements are all different."""
    at, params = 1, []
    for shape in shapes_:
        n = math.prod(shape)
        params.append(torch.arange(at, at + n, dtype=torch.float64).view(shape))
        at += n
    return params


@settings(max_examples=100, deadline=None)
@given(shapes, st.integers(1, 5), st.sampled_from([128, 256]))
def test_every_offset_is_aligned_and_padding_is_zero(shapes_, world, align):
    chunk = FlatChunk(named(shapes_), world=world, align=align)
    assert chunk.numel % (world * align) == 0
    assert chunk.shard_numel * world == chunk.numel
    assert all(slot.offset % align == 0 for slot in chunk.slots)
    ends = [0, *(slot.end for slot in chunk.slots)]
    assert all(a <= slot.offset for a, slot in zip(ends, chunk.slots, strict=False))
    buffer = chunk.allocate(torch.float64, "cpu")
    params = numbered(shapes_)
    chunk.fill(buffer, params)
    assert buffer.sum() == sum(p.sum() for p in params), "padding is not zero"
    assert chunk.allocate(torch.float32, "cpu", zero=True).count_nonzero() == 0


@settings(max_examples=150, deadline=None)
@given(shapes, st.integers(1, 5), st.data())
def test_flat_ranges_rebuild_every_parameter(shapes_, world, data):
    chunk = FlatChunk(named(shapes_), world=world)
    buffer = chunk.allocate(torch.float64, "cpu")
    params = numbered(shapes_)
    chunk.fill(buffer, params)
    cuts = sorted(data.draw(st.lists(st.integers(0, chunk.numel), max_size=4)))
    full = [torch.zeros_like(p) for p in params]
    for low, high in zip([0, *cuts], [*cuts, chunk.numel], strict=True):
        part = buffer[low:high].clone()
        for name, boxed in chunk.boxed(part, low).items():
            for box, view in boxed.pieces:
                assert view.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
                full[int(name[1:])][box.slices()] += view
    assert all(torch.equal(a, b) for a, b in zip(full, params, strict=True))
    for index in range(world):
        low, high = chunk.shard_range(index)
        covered = sum(part.high - part.low for part in chunk.overlaps(low, high))
        assert covered <= high - low
    total = sum(p.high - p.low for i in range(world) for p in chunk.overlaps(*chunk.shard_range(i)))
    assert total == sum(p.numel() for p in params)


def test_views_share_the_buffer():
    chunk = FlatChunk(named([(3, 2), (), (130,)]))
    buffer = chunk.allocate(torch.float32, "cpu", zero=True)
    views = chunk.views(buffer)
    assert [tuple(v.shape) for v in views] == [(3, 2), (), (130,)]
    for i, view in enumerate(views):
        view.fill_(i + 1.0)
    assert buffer[:6].eq(1).all() and buffer[128] == 2 and buffer[256:386].eq(3).all()
    assert buffer.count_nonzero() == 6 + 1 + 130
    assert chunk.names == ("p0", "p1", "p2")


def test_layouts_of_parts_reach_the_boxes():
    param = torch.zeros(2, 3)
    attach(param, Layout((4, 3)).then("tp", 2, 1, Shard(0)))
    chunk = FlatChunk([("w", param)], world=2)
    (boxed,) = chunk.boxed(torch.arange(128.0), 0).values()
    assert boxed.global_shape == (4, 3)
    assert [(box.offset, view.tolist()) for box, view in boxed.pieces] == [((2, 0), [[0, 1, 2], [3, 4, 5]])]
    assert chunk.boxed(torch.zeros(128), 128) == {}, "a shard of padding holds nothing"


def test_meta_and_transposed_parameters():
    chunk = FlatChunk([("m", torch.empty(3, 4, device="meta")), ("t", torch.empty(4, 3).t())])
    buffer = chunk.allocate(torch.float64, "cpu")
    values = numbered([(3, 4), (4, 3)])
    chunk.fill(buffer, [values[0], values[1].t()])
    assert torch.equal(chunk.views(buffer)[1], values[1].t())


def test_bad_alignment_is_refused():
    for align in (0, 64, -128):
        with pytest.raises(LayoutError, match="alignment"):
            FlatChunk([], align=align)
