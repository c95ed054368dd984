"""Layouts and boxes: full -> shards -> boxes -> full is exact, and so is the way over DTensor."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor as dt
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.errors import LayoutError
from cai_mesh.layout import Box, Layout, Replicate, Shard, attach, layout_of, placements_of
from cai_mesh.testing import run_ranks


@st.composite
def layouts(draw, max_steps=3):
    shape = tuple(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3)))
    layout = Layout(shape)
    for i in range(draw(st.integers(0, max_steps))):
        degree = draw(st.integers(1, 4))
        if draw(st.booleans()):
            dim = draw(st.integers(0, len(shape) - 1))
            cut = draw(st.integers(0, shape[dim]))
            sections = draw(st.sampled_from([None, (cut, shape[dim] - cut)]))
            placement = Shard(dim, sections, draw(st.integers(1, 2)))
        else:
            placement = Replicate()
        layout = layout.then(f"a{i}", degree, 0, placement)
    return layout


def every_rank(layout):
    axes = {s.axis: s.degree for s in layout.steps}
    for indices in itertools.product(*(range(d) for d in axes.values())):
        yield layout.at(dict(zip(axes, indices, strict=True)))


def local_of(full, layout):
    local = torch.full(layout.local_shape, -1, dtype=full.dtype)
    for index, box in layout.slices():
        local[index] = full[box.slices()]
    return local


def copies(layout):
    return math.prod(s.degree for s in layout.steps if isinstance(s.placement, Replicate))


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_shards_cover_the_full_tensor_exactly_once(layout):
    full = torch.arange(math.prod(layout.global_shape)).view(layout.global_shape)
    seen = torch.zeros_like(full)
    rebuilt = torch.full_like(full, -1)
    for rank in every_rank(layout):
        local = local_of(full, rank)
        assert (local >= 0).all(), "a local element belongs to no box"
        for index, box in rank.slices():
            rebuilt[box.slices()] = local[index]
            seen[box.slices()] += 1
    assert torch.equal(rebuilt, full)
    assert (seen == copies(layout)).all()


@settings(max_examples=300, deadline=None)
@given(layouts(), st.data())
def test_flat_ranges_are_exact_boxes(layout, data):
    full = torch.arange(math.prod(layout.global_shape)).view(layout.global_shape)
    for rank in every_rank(layout):
        local = local_of(full, rank).flatten()
        low = data.draw(st.integers(0, local.numel()))
        high = data.draw(st.integers(low, local.numel()))
        held = local[low:high].clone()
        pieces = rank.boxes((low, high))
        assert sum(p.box.numel for p in pieces) == high - low
        for piece in pieces:
            assert torch.equal(piece.view(held), full[piece.box.slices()])


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 40), st.integers(1, 6))
def test_one_section_is_torch_chunk(size, degree):
    chunks = torch.arange(size).chunk(degree)
    for i in range(degree):
        expected = chunks[i].tolist() if i < len(chunks) else []
        (segments,) = [Layout((size,)).then("x", degree, i, Shard(0)).segments(0)]
        assert [v for s, n in segments for v in range(s, s + n)] == expected


def test_packed_sections_are_cut_each():
    layout = Layout((12,)).then("tp", 2, 1, Shard(0, (6, 2, 4)))
    assert layout.segments(0) == [(3, 3), (7, 1), (10, 2)]


def test_units_keep_heads_whole():
    parts = [Layout((12,)).then("tp", 2, i, Shard(0, None, 4)).local_shape for i in range(2)]
    assert parts == [(8,), (4,)]


def test_bad_layouts_are_refused():
    with pytest.raises(LayoutError, match="dim"):
        Layout((4,)).then("tp", 2, 0, Shard(1))
    with pytest.raises(LayoutError, match="sections"):
        Layout((4,)).then("tp", 2, 0, Shard(0, (1, 2)))
    with pytest.raises(LayoutError, match="index"):
        Layout((4,)).then("tp", 2, 2, Shard(0))
    with pytest.raises(LayoutError, match="does not describe"):
        attach(torch.zeros(3), Layout((4,)))
    with pytest.raises(LayoutError, match="packed"):
        placements_of(Layout((4,)).then("tp", 2, 0, Shard(0, (2, 2))), ["tp"])


def test_boxes_intersect():
    assert Box((0, 2), (3, 3)).intersect(Box((1, 0), (5, 3))) == Box((1, 2), (2, 1))
    assert Box((0,), (2,)).intersect(Box((2,), (2,))) is None


def _dtensor_round_trips(cases):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    where = dict(zip(("a", "b"), mesh.get_coordinate(), strict=True))
    for shape, placements in cases:
        full = torch.arange(math.prod(shape)).view(shape)
        tensor = dt.distribute_tensor(full, mesh, placements)
        layout = layout_of(tensor)
        assert layout.local_shape == tuple(tensor.to_local().shape), (shape, placements)
        assert torch.equal(local_of(full, layout), tensor.to_local())
        assert tuple(placements_of(layout, ("a", "b"))) == tuple(placements)
    # a cut along the outer mesh dimension after the inner one, as FSDP over tensor parallelism makes it
    late = Layout((8, 3)).then("b", 2, where["b"], Shard(0)).then("a", 2, where["a"], Shard(0))
    full = torch.arange(24).view(8, 3)
    wrapped = dt.DTensor.from_local(
        local_of(full, late),
        mesh,
        placements_of(late, ("a", "b")),
        run_check=False,
        shape=full.shape,
        stride=full.stride(),
    )
    assert layout_of(wrapped) == late
    assert torch.equal(wrapped.full_tensor(), full)


def test_dtensor_is_exact_both_ways():
    S, R = dt.Shard, dt.Replicate
    cases = [
        ((5, 3), (S(0), S(1))),
        ((5, 3), (S(1), R())),
        ((7, 2), (S(0), S(0))),
        ((1, 5), (R(), S(1))),
        ((4,), (R(), R())),
    ]
    run_ranks(4, _dtensor_round_trips, cases)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_cut_over_several_axes_is_one_over_their_product(data):
    degrees = data.draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    blocks, unit = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    section = data.draw(st.integers(1, 14))
    sections = (section,) * blocks if blocks > 1 else None
    shape = (section * blocks, 2)
    for place in itertools.product(*(range(d) for d in degrees)):
        flat = 0
        for degree, index in zip(degrees, place, strict=True):
            flat = flat * degree + index
        axes = [(f"a{i}", d, index) for i, (d, index) in enumerate(zip(degrees, place, strict=True))]
        got = Layout(shape).across(axes, Shard(0, sections, unit))
        one = Layout(shape).then("a", math.prod(degrees), flat, Shard(0, sections, unit))
        assert got.segments(0) == one.segments(0)
        assert [step.axis for step in got.steps] == [axis for axis, _, _ in axes]


def test_unequal_sections_over_several_axes():
    axes = [("tp_row", 2, 0), ("tp_col", 2, 1)]
    assert Layout((24,)).across(axes, Shard(0, (16, 4, 4))).segments(0) == [(4, 4), (17, 1), (21, 1)]
    with pytest.raises(LayoutError, match="different lengths"):
        Layout((26,)).across(axes, Shard(0, (16, 5, 5)))
    assert Layout((5,)).across(axes, Replicate()).local_shape == (5,)
