"""Meshes, groups of several axes, and indices that agree with them."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch.distributed as dist

from cai_mesh.comm import (
    AXES,
    EXPERT_AXES,
    EXPERT_GRADIENT_AXES,
    GRADIENT_AXES,
    MeshSpec,
    ParallelMesh,
    axis_names,
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
    both = ParallelMesh.of(mesh, ep=2)
    expert = both.expert
    assert axis_names(expert) == EXPERT_AXES
    assert tuple(expert.mesh.shape) == (2, 1, 2, 2, 1)
    assert both.index("pp") == index(mesh, "pp") and both.degree(("edp", "ep")) == 4
    check_groups(expert)
    assert both.group("edp") is expert.get_group("edp") and both.group(("dp_shard", "tp")) is group(
        mesh, ("dp_shard", "tp")
    )
    assert both.coordinate().keys() == {*AXES, *EXPERT_AXES}
    with pytest.raises(MeshError, match="no view of the ranks"):
        both.group(("tp", "ep"))
    with pytest.raises(MeshError, match="do not divide the ranks they regroup"):
        ParallelMesh.of(mesh, ep=3)
    with pytest.raises(MeshError, match="not from a slice"):
        ParallelMesh.of(mesh["dp_shard", "tp"], ep=2)
    with pytest.raises(MeshError, match="does not fit"):
        build_mesh(MeshSpec(tp=3))


def test_groups_of_any_axes():
    run_ranks(8, eight)


def foreign():
    line = dist.init_device_mesh("cpu", (2,))
    assert axis_names(line) == ("ranks",)
    assert coordinate(line) == {"ranks": dist.get_rank()}
    assert dist.get_process_group_ranks(group(line, "ranks")) == [0, 1]
    assert group(line, "tp") is None
    assert (degree(line, "tp"), index(line, "tp")) == (1, 0)
    assert ParallelMesh.of(line, alone="tp").group("tp") is line.get_group()
    unnamed = dist.init_device_mesh("cpu", (2, 1))
    with pytest.raises(MeshError, match="no names"):
        axis_names(unnamed)
    named = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    for ask in (lambda: degree(named, "tensor"), lambda: ParallelMesh.of(named, alone="tp")):
        with pytest.raises(MeshError, match="nobody knows what axis 'data'") as caught:
            ask()
        assert 'axes={"ROLE": "data", "ROLE": "tensor"}' in str(caught.value)
    told = ParallelMesh.of(named, axes={"dp_shard": "data", "tp": ["tensor"]})
    assert ParallelMesh.of(told) is told and copy.deepcopy(told) is told
    assert told.leaves(("tp", "dp_shard", "cp")) == ("data", "tensor")
    assert told.group("tp") is told.group("tensor") is named.get_group("tensor")
    assert (told.degree("tp"), told.index("tp"), told.degree("pp")) == (2, dist.get_rank(), 1)
    with pytest.raises(MeshError, match="'tensro'") as caught:
        told.group("tensro")
    assert "did you mean 'tensor'?" in str(caught.value)
    with pytest.raises(MeshError, match="without an expert view"):
        told.group("ep")
    with pytest.raises(MeshError, match="has its roles already"):
        ParallelMesh.of(told, axes={"tp": "tensor"})
    with pytest.raises(MeshError, match="there is no role 'tpp'"):
        ParallelMesh.of(named, axes={"tpp": "tensor"})
    for axes in ({"tp": "tenser"}, {"tp": "tensor", "cp": "tensor"}):
        with pytest.raises(MeshError, match="at most once"):
            ParallelMesh.of(named, axes=axes)
    with pytest.raises(MeshError, match="a test needs a mesh axis 'pp'"):
        require_axis(told, "pp", "a test")
    require_axis(told, "tp", "a test")
    alone = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    assert group(alone, "x") is alone.get_group() and group(named["tensor"], "tensor") is not None


def test_meshes_that_are_not_ours():
    run_ranks(2, foreign)


def leaves():
    mesh = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp_shard", "tp_row", "tp_col"))
    both = ParallelMesh.of(mesh, ep=4, etp=2)
    assert both.leaves("tp") == ("tp_row", "tp_col") and both.degree("tp") == 4
    assert set(both.leaves(GRADIENT_AXES)) == {"dp_shard", "dp_replicate"} and both.leaves(
        EXPERT_GRADIENT_AXES
    ) == (
        "dp_replicate",
        "edp",
    )
    assert dist.get_process_group_ranks(both.group("tp")) == members(mesh, ("tp_row", "tp_col"))
    assert both.has("tp") and not both.has("cp") and not both.has("tp_depth") and both.has("ep")
    # the user's dimensions in another order, under other names
    other = dist.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("model", "replica", "data"))
    roles = {"tp": "model", "dp_replicate": "replica", "dp_shard": "data"}
    expert = ParallelMesh.of(other, axes=roles, ep=2).expert
    rank = dist.get_rank()
    model, replica, data = (int(i) for i in other.get_coordinate())
    assert dict(zip(axis_names(expert), expert.get_coordinate(), strict=True)) == {
        "pp": 0, "replica": replica, "edp": data, "ep": model, "etp": 0
    }  # fmt: skip
    made = dist.device_mesh.DeviceMesh("cpu", expert.mesh, mesh_dim_names=axis_names(expert))
    assert ParallelMesh.of(other, axes=roles, expert=made).index("ep") == model
    with pytest.raises(MeshError, match="no expert view"):
        ParallelMesh.of(other, axes=roles, expert=other["data"])
    assert rank == dist.get_rank()


def test_roles_expand_in_one_place():
    run_ranks(8, leaves)


def outside():
    mesh = dist.device_mesh.DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if dist.get_rank() == 0:
        assert coordinate(mesh) == {"tp": 0}
        return
    with pytest.raises(MeshError, match="not part of the mesh"):
        coordinate(mesh)


def test_a_rank_outside_the_mesh_is_told():
    run_ranks(2, outside)
