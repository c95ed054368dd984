"""Ranks that no longer run the same loop are told, before their collectives are matched with others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.testing import RankError, run_ranks
from cai_zero import no_sync, shard_module, shard_optimizer


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.turned = False

    def forward(self, x):
        for layer in reversed(self.layers) if self.turned else self.layers:
            x = torch.tanh(layer(x))
        return x


def sharded(stage):
    torch.manual_seed(0)
    model, mesh = Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    if stage == 3:
        shard_module(model, mesh)
        return model, torch.optim.SGD(model.parameters(), lr=0.1)
    return model, shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), mesh, model=model, stage=stage)


def loop(stage, strange, steps=3):
    """`strange(model, optimizer, step)` is what rank 1 does in place of a step of the loop."""
    model, optimizer = sharded(stage)
    for step in range(steps):
        if dist.get_rank() == 1 and step == 1:
            strange(model, optimizer, step)
            continue
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def one_backward_more(stage):
    def strange(model, optimizer, step):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(stage, strange)


def one_backward_less(stage):
    def strange(model, optimizer, step):
        optimizer.step()
        optimizer.zero_grad()

    return loop(stage, strange)


def another_order(stage):
    def strange(model, optimizer, step):
        model.turned = True
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return loop(stage, strange)


def an_evaluation_on_one_rank(stage):
    def strange(model, optimizer, step):
        with torch.no_grad():
            model(torch.ones(2, 4))
        one_step(model, optimizer)

    return loop(stage, strange)


def one_step(model, optimizer):
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("apart", "stage"),
    [
        *((one_backward_more, stage) for stage in range(4)),
        (one_backward_less, 3),
        (another_order, 3),
        (an_evaluation_on_one_rank, 3),
    ],
)
def test_ranks_that_come_apart_are_told(apart, stage):
    with pytest.raises(RankError, match="no longer run the same loop"):
        run_ranks(2, apart, stage, timeout=10)


@pytest.mark.parametrize("stage", range(3))
def test_a_rank_without_a_batch_adds_nothing(stage):
    """Its gradients are zero, and it steps with those of the others."""
    first, second = run_ranks(2, one_backward_less, stage, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("stage", range(3))
def test_another_order_is_right_where_parameters_are_whole(stage):
    first, second = run_ranks(2, another_order, stage, timeout=60)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def many_steps_and_accumulation(stage):
    model, optimizer = sharded(stage)
    for step in range(150):
        for part in range(step % 3 + 1):
            with no_sync(model if stage == 3 else optimizer) if part == 1 else torch.enable_grad():
                model(torch.ones(2, 4)).sum().backward()
        if step % 10 == 0:
            with torch.no_grad():
                model(torch.ones(1, 4))
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_run_alike_are_left_alone(stage):
    run_ranks(2, many_steps_and_accumulation, stage, timeout=60)
