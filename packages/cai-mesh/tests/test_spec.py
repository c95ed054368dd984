"""Degrees of a mesh against the number of ranks."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cai_mesh.comm import AXES, MeshSpec
from cai_mesh.errors import MeshError

degrees = st.integers(1, 6)


@settings(deadline=None)
@given(st.lists(degrees, min_size=5, max_size=5), st.integers(-1, 4))
def test_an_open_axis_takes_the_rest(sizes, open_axis):
    world = math.prod(sizes)
    given_sizes = dict(zip(AXES, sizes, strict=True))
    if open_axis >= 0:
        given_sizes[AXES[open_axis]] = -1
    spec = MeshSpec(**given_sizes).resolve(world)
    assert list(spec.sizes().values()) == sizes
    assert spec.world_size == world
    assert spec.resolve(world) == spec


def test_experts_regroup_ranks():
    spec = MeshSpec(pp=2, dp_shard=-1, tp=2, ep=4, etp=1).resolve(16)
    assert (spec.dp_shard, spec.edp) == (4, 2)
    with pytest.raises(MeshError, match="expert axes do not divide") as caught:
        MeshSpec(dp_shard=2, tp=2, ep=3).resolve(4)
    assert "dp_shard x cp x tp = 4" in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "world", "expected"),
    [
        (MeshSpec(tp=2, pp=2), 6, "4 ranks"),
        (MeshSpec(tp=4, dp_shard=-1), 6, "a multiple of 4 ranks"),
        (MeshSpec(tp=4, dp_shard=-1), 2, "a multiple of 4 ranks"),
        (MeshSpec(dp_shard=-1), 0, "a multiple of 1 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(spec, world, expected):
    with pytest.raises(MeshError, match="does not fit") as caught:
        spec.resolve(world)
    assert caught.value.expected == expected
    assert f"{world} ranks for pp " in caught.value.got


@pytest.mark.parametrize("bad", [0, -2, 1.5, True, "2", None])
def test_impossible_degrees_are_refused(bad):
    for axis in (*AXES, "ep", "etp"):
        with pytest.raises(MeshError, match=f"'{axis}' has an impossible degree"):
            MeshSpec(**{axis: bad})


def test_open_axes_are_few():
    with pytest.raises(MeshError, match="'ep'"):
        MeshSpec(ep=-1)
    with pytest.raises(MeshError, match="more than one"):
        MeshSpec(tp=-1, pp=-1)
    with pytest.raises(MeshError, match="open axis"):
        _ = MeshSpec(tp=-1).world_size
