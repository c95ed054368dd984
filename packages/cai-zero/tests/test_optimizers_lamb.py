"""LAMB equals its formula on full tensors, however the parameters are divided."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import toy
from over_ranks import full_parameters
from torch.distributed.tensor import Shard, distribute_tensor

from cai_mesh.errors import MeshError, PlanError
from cai_mesh.testing import run_ranks
from cai_zero import shard_module
from cai_zero.optimizers import Adafactor, AdamW, Came, Lamb, Lars

LR, BETAS, EPS, DECAY, BOUND = 0.02, (0.9, 0.99), 1e-6, 0.1, 4.0


def make(model, mesh):
    return Lamb(
        toy.groups_of(model, ("layers.0.bias",), adapt=False, weight_decay=0.0),
        lr=LR,
        betas=BETAS,
        eps=EPS,
        weight_decay=DECAY,
        max_trust=BOUND,
        mesh=mesh,
    )


def lamb(name, p, grad, state, step):
    plain = name == "layers.0.bias"
    m = state["m"] = BETAS[0] * state.get("m", 0) + (1 - BETAS[0]) * grad
    v = state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * grad**2
    u = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)) ** 0.5 + EPS)
    u = u + (0 if plain else DECAY) * p
    ratio = float(p.norm() / u.norm()) if not plain and p.norm() > 0 and u.norm() > 0 else 1.0
    return p - LR * min(ratio, BOUND) * u


def sharded(stages, shape):
    return toy.sharded(make, stages, shape)


def test_one_process():
    toy.compare(toy.one_process(make), toy.twin(lamb))


@pytest.mark.parametrize(("shape", "stages"), toy.LAYOUTS)
def test_equals_full_tensors(shape, stages):
    expected = toy.twin(lamb)
    for found in run_ranks(toy.ranks(shape), sharded, stages, shape):
        for stage in stages:
            toy.compare(found[stage], expected)


def forgotten(stage):
    model, optimizer, mesh = toy.built(lambda model, mesh: Lamb(model.parameters()), stage, (2,))
    with pytest.raises(MeshError, match="knows no mesh") as caught:
        toy.advance(model, optimizer, mesh, range(1))
    assert "dp_shard" in str(caught.value)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_mesh_that_was_forgotten(stage):
    run_ranks(2, forgotten, stage)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"betas": (0.9, 1.0)}, {"eps": -1e-8}, {"weight_decay": -0.1}, {"lr": "fast"}]
)
def test_options_out_of_range(options):
    with pytest.raises(PlanError, match=f"Lamb: {next(iter(options))}"):
        Lamb([torch.nn.Parameter(torch.zeros(2))], **options)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_parameters_that_cannot_be_stepped(dtype):
    param = torch.nn.Parameter(torch.zeros(2).to(dtype), requires_grad=False)
    with pytest.raises(PlanError, match="Lamb cannot step"):
        Lamb([param])


def test_a_sparse_gradient():
    embed = torch.nn.Embedding(4, 3, sparse=True)
    optimizer = Lamb(embed.parameters())
    embed(torch.tensor([1])).sum().backward()
    with pytest.raises(PlanError, match="sparse"):
        optimizer.step()


def test_a_closure_and_a_loss():
    param = torch.nn.Parameter(torch.ones(3))
    optimizer = Lamb([param])

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3.0
    assert float(param.detach().max()) < 1.0


def test_one_process_of_zero_3():
    model = toy.Toy()
    shard_module(model, None)
    toy.advance(model, make(model, None), None, range(toy.STEPS))
    toy.compare(full_parameters(model), toy.twin(lamb))


def of_dtensors(kind):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("rows",))
    full = torch.randn(7, 6, generator=toy.generator("d"))
    param = torch.nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))
    plain = torch.nn.Parameter(full.clone())
    optimizers = [make_one(kind, param, mesh), make_one(kind, plain, None)]
    for step in range(5):
        plain.grad = torch.randn(7, 6, generator=toy.generator(step))
        param.grad = distribute_tensor(plain.grad, mesh, [Shard(0)])
        for optimizer in optimizers:
            optimizer.step()
    return param.full_tensor().detach(), plain.detach()


def make_one(kind, param, mesh):
    if kind is AdamW:
        return AdamW([param], lr=0.1, state_dtype=torch.bfloat16)
    return kind([param], lr=0.1, mesh=mesh)


@pytest.mark.parametrize("kind", [Lamb, Lars, Adafactor, Came, AdamW])
def test_dtensors(kind):
    for got, expected in run_ranks(2, of_dtensors, kind):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)


def test_weights_and_updates_of_zero_move_without_a_ratio():
    for weight, grad, moved in ((0.0, 1.0, 0.5), (1.0, 0.0, 0.0), (0.0, 0.0, 0.0)):
        param = torch.nn.Parameter(torch.full((3, 2), weight))
        param.grad = torch.full((3, 2), grad)
        Lamb([param], lr=0.5, weight_decay=0.0).step()
        torch.testing.assert_close(param.detach(), torch.full((3, 2), weight - moved))
