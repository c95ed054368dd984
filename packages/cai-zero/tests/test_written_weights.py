"""What a loop writes to parameters reaches the master weights, and leaves the precision of all others."""

from __future__ import annotations

import over_ranks
import pytest
import torch
from torch import nn

from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, shard_optimizer

LIMIT = 0.125


def clamp_data(model):
    for param in model.parameters():
        param.data.clamp_(-LIMIT, LIMIT)


def clamp(model):
    with torch.no_grad():
        for param in model.parameters():
            param.clamp_(-LIMIT, LIMIT)


def load(model):
    values = {n: p.detach().clone().clamp_(-LIMIT, LIMIT) for n, p in model.named_parameters()}
    model.load_state_dict(values)


def look(model):
    assert all(param.data.isfinite().all() for param in model.parameters())


def masters(write, stage):
    """Master weights before and after a write and a step that changes nothing by itself; and the parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 5))
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = shard_optimizer(
        sgd, over_ranks.line(), model=model, stage=stage, precision=MixedPrecision(compute=torch.bfloat16)
    )
    before = {n: v.clone() for n, v in over_ranks.full_values(dict(optimizer.weights())).items()}
    write(model)
    model(torch.ones(2, 13, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    return before, over_ranks.full_values(optimizer.weights()), dict(model.named_parameters())


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("write", [clamp_data, clamp, load, look])
def test_masters_take_what_is_written(write, stage):
    for before, after, params in run_ranks(2, masters, write, stage):
        for name, value in before.items():
            rounded = value.to(torch.bfloat16).float()
            limited = (
                value if write is look else value.where(rounded.abs() <= LIMIT, rounded.clamp(-LIMIT, LIMIT))
            )
            assert torch.equal(after[name], limited), name
            assert torch.equal(params[name].float(), limited.to(torch.bfloat16).float())


def moments(stage):
    """What a loop sees of an optimizer's state, sets and takes away by the parameters of the model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(13, 7), nn.Tanh(), nn.Linear(7, 5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if stage is not None:
        optimizer = shard_optimizer(optimizer, over_ranks.line(), model=model, stage=stage)
    looks = []
    for _ in range(3):
        model(torch.ones(2, 13)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            slots = optimizer.state[param]
            looks += [float(slots["exp_avg"].norm()), float(slots["exp_avg_sq"].max()), float(slots["step"])]
            assert slots["exp_avg"].shape == param.shape and param in optimizer.state
            slots["exp_avg"].mul_(0.5)
            slots["exp_avg_sq"] = torch.full(param.shape, 0.25)
        optimizer.state.pop(model[0].bias)
        assert model[0].bias not in optimizer.state
    return looks, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_state_of_an_optimizer_is_that_of_whole_parameters(stage):
    expected, weights = moments(None)
    for looks, params in run_ranks(2, moments, stage):
        assert looks == pytest.approx(expected, rel=1e-5)
        for param, weight in zip(params, weights, strict=True):
            torch.testing.assert_close(param, weight, rtol=1e-5, atol=1e-6)


def test_what_is_written_to_a_gradient_in_another_order_of_memory_is_kept():
    """Of a parameter that the optimizer does not have."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    shard_optimizer(torch.optim.SGD(model[1].parameters(), lr=0.1), None, model=model)
    gradient = torch.arange(12.0).view(3, 4).t()
    model[0].weight.grad = gradient.clone(memory_format=torch.preserve_format)
    model[0].weight.grad.mul_(2.0)
    assert torch.equal(model[0].weight.grad, 2.0 * gradient)
