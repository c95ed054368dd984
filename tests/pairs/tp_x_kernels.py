"""Models cut over tensor-parallel ranks, then swapped for kernels, train as swapped ones on one process."""

from __future__ import annotations

import pytest
import torch
import twin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_kernels import swap
from cai_mesh import BoxedTensor
from cai_mesh.errors import PlanError
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import Plan, parallelize


def plain_loss(model, ids):
    return twin.loss_of(model(input_ids=ids, use_cache=False).logits, ids)


def step_through(model, loss_of):
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for step in range(twin.STEPS):
        loss = loss_of(model, twin.batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def train(name: str):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = parallelize(twin.build(name).train(), mesh, logits="sharded")
    record = swap(model)
    losses = step_through(model, twin.own_loss)
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, twin.full(boxed), sorted({r.kind for r in record.replaced}), record.kept


@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str):
    model = twin.build(name).train()
    swap(model, kinds=["norm", "activation", "rope"])
    losses = step_through(model, plain_loss)
    final = {n: p.detach() for n, p in model.named_parameters()}
    for got in run_ranks(2, train, name):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert_same_as_one_device(got[1], final, tolerance=1e-8)
        assert got[2] == (["norm"] if name == "gpt2" else ["activation", "norm", "rope"])
        assert [(k.kind, "replaced before" in k.reason) for k in got[3]] == [("loss", True)]


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(16, 32)

    def get_output_embeddings(self):
        return self.head

    def forward(self, x):
        return self.head(x)


def cut():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Headed().train()
    assert [r.kind for r in swap(model).replaced] == ["loss"]
    weight = model.head.weight
    with pytest.raises(PlanError, match="head cannot be cut"):
        parallelize(model, mesh, Plan({"head": "colwise"}))
    assert model.head.weight is weight and weight.shape == (32, 16)


def test_a_head_with_a_fused_loss_is_not_cut():
    run_ranks(2, cut)
