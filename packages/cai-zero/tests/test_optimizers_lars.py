"""LARS equals its formula on full tensors, however the parameters are divided."""

from __future__ import annotations

import pytest
import torch
import toy

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_zero.optimizers import Lars

LR, MOMENTUM, DECAY, TRUST = 2.0, 0.8, 0.01, 0.02


def make(model, mesh):
    groups = toy.groups_of(model, ("layers.0.bias", "layers.0.norm"), adapt=False, weight_decay=0.0, lr=0.05)
    return Lars(groups, lr=LR, momentum=MOMENTUM, weight_decay=DECAY, trust=TRUST, mesh=mesh)


def lars(name, p, grad, state, step):
    adapt = name not in ("layers.0.bias", "layers.0.norm")
    rate, decay, ratio = (LR, DECAY, 1.0) if adapt else (0.05, 0.0, 1.0)
    if adapt and p.norm() > 0:
        ratio = TRUST * float(p.norm()) / float(grad.norm() + decay * p.norm())
    state["v"] = MOMENTUM * state.get("v", 0) + rate * ratio * (grad + decay * p)
    return p - state["v"]


def sharded(stages, shape):
    return toy.sharded(make, stages, shape)


def test_one_process():
    toy.compare(toy.one_process(make), toy.twin(lars))


@pytest.mark.parametrize(("shape", "stages"), toy.LAYOUTS)
def test_equals_full_tensors(shape, stages):
    expected = toy.twin(lars)
    for found in run_ranks(toy.ranks(shape), sharded, stages, shape):
        for stage in stages:
            toy.compare(found[stage], expected)


def test_weights_and_gradients_of_zero():
    for weight, grad in ((0.0, 1.0), (1.0, 0.0), (0.0, 0.0)):
        param = torch.nn.Parameter(torch.full((3, 2), weight))
        param.grad = torch.full((3, 2), grad)
        Lars([param], lr=0.5, momentum=0.0).step()
        assert torch.equal(param.detach(), torch.full((3, 2), weight - 0.5 * grad))


@pytest.mark.parametrize("options", [{"momentum": 1.0}, {"trust": -1.0}, {"lr": "1"}])
def test_options_out_of_range(options):
    with pytest.raises(PlanError, match=f"Lars: {next(iter(options))}"):
        Lars([torch.nn.Parameter(torch.zeros(2))], **options)
