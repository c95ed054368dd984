"""Meshes, groups of several axes, and indices that agree with them."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist

from cai_mesh.comm import (
    AXES,
    EXPERT_AXES,
    MeshSpec,
    axis_names,
    build_expert_mesh,
    build_mesh,
    coordinate,
    degree,
    group,
    index,
    require_axis,
)
from cai_mesh.errors import MeshError
from cai_mesh.testing import run_ranks


def members(mesh, axes):
    """Ranks that share this rank's coordinates along all other axes, in mesh order."""
    here = coordinate(mesh)
    names = axis_names(mesh)
    found = []
    for where in itertools.product(*(range(mesh.size(i)) for i in range(mesh.ndim))):
        if all(a in axes or here[a] == w for a, w in zip(names, where, strict=True)):
            found.append(int(mesh.mesh[where]))
    return found


def check_groups(mesh):
    names = axis_names(mesh)
    for count in range(1, len(names) + 1):
        for axes in itertools.combinations(names, count):
            expected = members(mesh, axes)
            assert degree(mesh, axes) == len(expected)
            assert expected[index(mesh, axes)] == dist.get_rank()
            assert index(mesh, tuple(reversed(axes))) == index(mesh, axes), (
                "the order asked for is not a mesh"
            )
            found = group(mesh, axes)
            if len(expected) == 1:
                assert found is None
                continue
            assert dist.get_process_group_ranks(found) == expected
            assert dist.get_rank(found) == index(mesh, axes)
            assert group(mesh, tuple(reversed(axes))) is found, "the group was made twice"


def eight():
    mesh = build_mesh(MeshSpec(pp=2, dp_shard=-1, tp=2))
    assert axis_names(mesh) == AXES
    assert tuple(mesh.mesh.shape) == (2, 1, 2, 1, 2)
    check_groups(mesh)
    expert = build_expert_mesh(MeshSpec(pp=2, dp_shard=2, tp=2, ep=2))
    assert axis_names(expert) == EXPERT_AXES
    assert tuple(expert.mesh.shape) == (2, 1, 2, 2, 1)
    assert index(expert, "pp") == index(mesh, "pp")
    check_groups(expert)
    with pytest.raises(MeshError, match="does not fit"):
        build_mesh(MeshSpec(tp=3))


def test_groups_of_any_axes():
    run_ranks(8, eight)


def foreign():
    line = dist.init_device_mesh("cpu", (2,))
    assert axis_names(line) == ("dp_shard",)
    assert coordinate(line) == {"dp_shard": dist.get_rank()}
    assert dist.get_process_group_ranks(group(line, "dp_shard")) == [0, 1]
    assert group(line, "tp") is None
    assert (degree(line, "tp"), index(line, "tp")) == (1, 0)
    unnamed = dist.init_device_mesh("cpu", (2, 1))
    with pytest.raises(MeshError, match="no names"):
        axis_names(unnamed)
    named = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    assert degree(named, ("data", "tensor")) == 2
    with pytest.raises(MeshError, match="'tensro'") as caught:
        require_axis(named, "tensro", "a test")
    assert "did you mean 'tensor'?" in str(caught.value)
    require_axis(named, "tensor", "a test")
    alone = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    assert group(alone, "x") is alone.get_group()


def test_meshes_that_are_not_ours():
    run_ranks(2, foreign)


def outside():
    mesh = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if dist.get_rank() == 0:
        assert coordinate(mesh) == {"tp": 0}
        return
    with pytest.raises(MeshError, match="not part of the mesh"):
        coordinate(mesh)


def test_a_rank_outside_the_mesh_is_told():
    run_ranks(2, outside)
