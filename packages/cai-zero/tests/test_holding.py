"""Whole weights for a while: each rank infers what it likes, and the loop around trains as though it had not."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh.errors import PlanError
from cai_mesh.testing import RankError, run_ranks
from cai_zero import full_state_dict, shard_module, unsharded


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(x)


def net():
    torch.manual_seed(0)
    return Net().double()


def sample(step, rank):
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(3, 4, generator=generator, dtype=torch.float64)


def train(asks, frozen=False):
    """Train three steps on two ranks; in between, each infers `asks[rank]` times with the weights of that moment."""
    model, rank = net(), dist.get_rank()
    model.layers[0].requires_grad_(not frozen)
    shard_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    optimizer, said = torch.optim.AdamW(model.parameters(), lr=0.1), []
    for step in range(3):
        model(sample(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if asks[0] is None:
            continue
        state = [full_state_dict(model)]
        dist.broadcast_object_list(state, 0)
        plain = net()
        plain.load_state_dict(state[0])
        with unsharded(model), torch.no_grad():
            for number in range(asks[rank]):
                said.append(model(sample(number, 7)))
                assert torch.equal(said[-1], plain(sample(number, 7)))
            assert torch.equal(model.last.weight, plain.last.weight)
    return full_state_dict(model), len(said)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_loop_trains_on_as_though_nobody_had_inferred(frozen):
    (inferring, first), (_, second) = run_ranks(2, train, (4, 1), frozen)
    (plain, _), _ = run_ranks(2, train, (None, None), frozen)
    assert (first, second) == (12, 3)
    for name in plain:
        assert torch.equal(inferring[name], plain[name]), name


def refusals(what):
    model = net()
    shard_module(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    x = sample(0, 0)
    if what == "graph":
        with unsharded(model), pytest.raises(PlanError, match="held for inference"):
            model(x)
    elif what == "backward":
        loss = model(x).sum()
        with pytest.raises(PlanError, match="waits for its backward"), unsharded(model):
            raise AssertionError("weights were held")
        loss.backward()
    elif what == "error":
        with pytest.raises(RuntimeError, match="of the loop"), unsharded(model):
            raise RuntimeError("of the loop")
    elif dist.get_rank() == 0:  # a rank alone
        with unsharded(model):
            pass
    model(x).sum().backward()
    assert model.last.weight.grad is not None


@pytest.mark.parametrize("what", ["graph", "backward", "error"])
def test_a_model_trains_after_a_refusal(what):
    run_ranks(2, refusals, what)


def test_ranks_that_do_not_hold_weights_together_are_told():
    with pytest.raises(RankError, match="weights are held for inference"):
        run_ranks(2, refusals, "alone", timeout=60)


def test_a_model_that_nobody_has_sharded_has_its_weights():
    model = net()
    with unsharded(model):
        model(sample(0, 0)).sum().backward()
    assert model.last.weight.grad is not None
