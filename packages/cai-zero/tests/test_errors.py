"""What cannot be sharded is refused before anything changes."""

from __future__ import annotations

import re
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh import ParallelMesh
from cai_mesh.errors import LayoutError, MeshError, PlanError
from cai_mesh.layout import ReduceSpec
from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, shard_module, shard_optimizer, sharding_of
from cai_zero.reduction.ranks import RankTable


def adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
def test_parameters_that_are_not_real_numbers(dtype):
    model = nn.Linear(3, 3)
    model.odd = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=False)
    with pytest.raises(PlanError, match="'odd' cannot be sharded") as caught:
        shard_module(model, None)
    assert str(dtype) in str(caught.value)
    assert model.weight.shape == (3, 3), "the model was changed before the error"
    if dtype.is_complex:
        model.odd.requires_grad_()
        with pytest.raises(PlanError, match="'odd' cannot be sharded"):
            shard_optimizer(adam(model), None, model=model)


def test_meta_parameters():
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    with pytest.raises(PlanError, match="meta device") as caught:
        shard_module(model, None)
    assert "meta" in str(caught.value)


def test_a_parameter_given_twice():
    model = nn.Linear(3, 3)
    inner = adam(model)
    inner.param_groups.append({**inner.param_groups[0], "params": [model.weight]})
    with pytest.raises(PlanError, match="twice"):
        shard_optimizer(inner, None, model=model)


def test_an_optimizer_of_another_model():
    with pytest.raises(PlanError, match="does not have") as caught:
        shard_optimizer(adam(nn.Linear(3, 4)), None, model=nn.Linear(3, 4))
    assert "2 of them, the first of shape (4, 3)" in str(caught.value)
    model = nn.Linear(3, 4)
    inner = adam(model)
    shard_module(model, None)
    with pytest.raises(PlanError, match="sharded or offloaded already"):
        shard_optimizer(inner, None, model=model)


def test_an_optimizer_with_state():
    model = nn.Linear(3, 3)
    inner = adam(model)
    model(torch.ones(1, 3)).sum().backward()
    inner.step()
    for optimizer in (inner, torch.optim.Adagrad(model.parameters())):
        with pytest.raises(PlanError, match="already has state"):
            shard_optimizer(optimizer, None, model=model)


def test_an_optimizer_with_nothing_to_train():
    model = nn.Linear(3, 3).requires_grad_(False)
    with pytest.raises(PlanError, match="no trainable"):
        shard_optimizer(adam(model), None, model=model)
    with pytest.raises(PlanError, match="no trainable"):
        shard_optimizer(adam(model), None)


@pytest.mark.parametrize("stage", [3, -1, "1", None])
def test_unknown_stages(stage):
    model = nn.Linear(3, 3)
    with pytest.raises(PlanError, match="unknown ZeRO stage"):
        shard_optimizer(adam(model), None, model=model, stage=stage)


@pytest.mark.parametrize("stage", [0, 2])
def test_stages_that_need_the_model(stage):
    with pytest.raises(PlanError, match="needs the model"):
        shard_optimizer(adam(nn.Linear(3, 3)), None, stage=stage)


@pytest.mark.parametrize(
    ("precision", "match"),
    [
        (MixedPrecision(compute=torch.int8), "compute dtype"),
        (MixedPrecision(master=torch.int32), "master dtype"),
        (MixedPrecision(reduce=torch.float8_e4m3fn), "reduce dtype"),
    ],
)
def test_dtypes_that_do_not_work(precision, match):
    model = nn.Linear(3, 3)
    with pytest.raises(PlanError, match=match):
        shard_optimizer(adam(model), None, model=model, precision=precision)
    with pytest.raises(PlanError, match=match):
        shard_module(nn.Linear(3, 3), None, precision=precision)


def test_dtypes_follow_one_another():
    bf16, f32, f64 = torch.bfloat16, torch.float32, torch.float64
    assert MixedPrecision().resolve(f64) == (f64, f64, f64)
    assert MixedPrecision().resolve(bf16) == (bf16, f32, f32)
    assert MixedPrecision(compute=bf16).resolve(f32) == (bf16, f32, f32)
    assert MixedPrecision(compute=torch.float16).resolve(f32) == (torch.float16, f32, f32)
    assert MixedPrecision(compute=bf16, master=bf16).resolve(f32) == (bf16, bf16, bf16)
    assert MixedPrecision(compute=bf16, reduce=bf16).resolve(f32) == (bf16, f32, bf16)


def test_closures_and_more_groups():
    model = nn.Linear(3, 3)
    optimizer = shard_optimizer(adam(model), None, model=model)
    with pytest.raises(PlanError, match="closure"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(PlanError, match="does not have"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_modules_sharded_twice_not_at_all_or_oddly():
    model = shard_module(nn.Linear(3, 3), None)
    with pytest.raises(PlanError, match="already sharded"):
        shard_module(model, None)
    with pytest.raises(PlanError, match="is not sharded"):
        sharding_of(nn.Linear(3, 3))
    with pytest.raises(PlanError, match="driver"):
        shard_module(nn.Linear(3, 3), None, driver="both")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="no parameters"):
        shard_module(nn.Tanh(), None)


def meshes():
    for names, why in (
        (("a", "b", "c"), "nobody knows what axis 'a'"),
        (("outer", "inner"), "nobody knows what axis 'outer'"),
        (("dp", "tp"), "nobody knows what axis 'dp'"),
        (("pp", "tp"), "finds no data axes"),
        (("tp",), "finds no data axes"),
    ):
        shape = (1,) * (len(names) - 1) + (2,)
        mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=names)
        with pytest.raises(MeshError, match=why) as caught:
            RankTable(mesh)
        assert "slice" in str(caught.value) and "ParallelMesh.of(mesh, axes=" in str(caught.value)
    assert RankTable(dist.init_device_mesh("cpu", (2,), mesh_dim_names=("any",))).of().shard_axes == ("any",)
    hybrid = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    found = RankTable(ParallelMesh.of(hybrid, axes={"dp_replicate": "outer", "dp_shard": "inner"})).of()
    assert (found.copy_axes, found.shard_axes, found.size) == (("outer",), ("inner",), 2)
    named = dist.init_device_mesh(
        "cpu", (2, 1, 1, 1), mesh_dim_names=("cp", "dp_replicate", "tp", "dp_shard")
    )
    found = RankTable(named).of()
    assert (found.copy_axes, found.shard_axes, found.size) == (("dp_replicate",), ("cp", "dp_shard"), 2)
    copies = RankTable(named, sharded=False).of()
    assert (copies.shard_axes, copies.size, copies.shard) == ((), 1, None)
    assert set(copies.copy_axes) == {"dp_replicate", "cp", "dp_shard"}
    leaves = dist.init_device_mesh("cpu", (1, 2, 1), mesh_dim_names=("dp_shard", "tp_row", "tp_col"))
    found = RankTable(leaves, [ReduceSpec(("dp_shard", "tp"))]).of(ReduceSpec(("dp_shard", "tp")))
    assert (found.shard_axes, found.size, found.partial.size()) == (("dp_shard",), 1, 2)
    with pytest.raises(MeshError, match="without an expert view"):
        RankTable(named, [ReduceSpec(("edp",))])


def test_meshes_are_read_by_name_or_refused():
    run_ranks(2, meshes)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_odd_parameters_are_refused_by_every_stage_and_named(dtype, stage):
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].odd = nn.Parameter(torch.zeros(2, dtype=dtype), requires_grad=dtype.is_complex)
    before = {n: p.data_ptr() for n, p in model.named_parameters()}
    if stage < 3 and not dtype.is_complex:
        shard_optimizer(adam(model), None, model=model, stage=stage)  # an integer is not trained, and stays
        return
    refused = r"'1\.odd' cannot be sharded"
    if stage == 3:
        with pytest.raises(PlanError, match=refused):
            shard_module(model, None)
    else:
        with pytest.raises(PlanError, match=refused):
            shard_optimizer(adam(model), None, model=model, stage=stage)
    assert {n: p.data_ptr() for n, p in model.named_parameters()} == before, "changed before the error"


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_an_optimizer_holds_is_compared_with_the_model_before_anything_changes(stage):
    model, other = nn.Linear(3, 4), nn.Linear(3, 4)
    inner = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(PlanError, match="does not have"):
        shard_optimizer(inner, None, model=model, stage=stage)
    inner = torch.optim.SGD([{"params": [model.weight]}, {"params": [model.bias], "lr": 0.2}], lr=0.1)
    inner.param_groups[1]["params"].append(model.weight)
    with pytest.raises(PlanError, match="twice"):
        shard_optimizer(inner, None, model=model, stage=stage)
    assert [p.data_ptr() for p in model.parameters()] == before


def mismatched():
    """Meshes that leave out this rank, or whose axes are not for data, fail on this rank, before a collective."""
    model = nn.Linear(3, 3)
    before = model.weight.detach().clone()
    named = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    cube = dist.init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("x", "y", "z"))
    alone = DeviceMesh("cpu", [0], mesh_dim_names=("data",))
    meshes = [named, cube] + [alone] * (dist.get_rank() == 1)
    for mesh in meshes:
        for stage in (0, 1, 2):
            with pytest.raises(MeshError):
                shard_optimizer(adam(model), mesh, model=model, stage=stage)
        with pytest.raises(MeshError):
            shard_module(model, mesh)
    assert torch.equal(model.weight, before)


def test_meshes_that_do_not_fit_fail_before_anything_changes():
    run_ranks(2, mismatched, timeout=30)


DYING = """
import os, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from cai_zero import shard_module, shard_optimizer

def die():
    open("died", "w").close()
    os.kill(os.getpid(), 9)

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
torch.manual_seed(0)
model = torch.nn.Sequential()
model.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(4))
stage = int(sys.argv[1])
if stage == 3:
    shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters())
else:
    inner = torch.optim.AdamW(model.parameters())
    optimizer = shard_optimizer(inner, mesh, model=model, stage=stage)
for step in range(50):
    x = torch.randn(8, 64, requires_grad=True)
    for i, layer in enumerate(model.layers):
        x = torch.tanh(layer(x))
        if i == 1 and step == 3 and dist.get_rank() == 1:
            x.register_hook(lambda grad: die())  # layers 3 and 2 are being reduced
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
print("not reached", flush=True)
"""


@pytest.mark.parametrize("stage", [1, 3])
def test_a_rank_that_dies_in_backward_ends_the_others_and_is_named(stage, tmp_path):
    (tmp_path / "dying.py").write_text(DYING)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    done = subprocess.run(
        [*launcher, "dying.py", str(stage)], cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode != 0
    assert time.time() - (tmp_path / "died").stat().st_mtime < 30
    root = done.stderr[done.stderr.index("Root Cause") :]
    assert re.search(r"rank +: 1 \(local_rank: 1\)\s+exitcode +: -9", root), done.stderr[-3000:]
    assert "not reached" not in done.stdout


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_model_moved_after_it_was_sharded(stage):
    model = nn.Linear(3, 3)
    if stage == 3:
        shard_module(model, None)
        optimizer = adam(model)
    else:
        optimizer = shard_optimizer(adam(model), None, model=model, stage=stage)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    if stage == 3:
        with pytest.raises(PlanError, match="another tensor was put in the data"):
            model.double()
        return
    model.double()

    def another_step():
        model(torch.ones(2, 3).double()).sum().backward()
        optimizer.step()

    with pytest.raises(LayoutError, match=r"'(weight|bias)' does not lie in its chunk"):
        another_step()
