"""Parameters that are gathered beside the next forward: whoever reads or writes one before waits for it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_mesh.gradients import ShownParameter
from cai_zero import shard_optimizer
from cai_zero.replicated.arriving import arriving

READS = {
    "data": lambda model: [p.data.clone() for p in model.parameters()],
    "detach": lambda model: [p.detach().clone() for p in model.parameters()],
    "clone": lambda model: [p.clone().detach() for p in model.parameters()],
    "foreach": lambda model: torch._foreach_mul([p.detach() for p in model.parameters()], 1.0),
    "state_dict": lambda model: [value.clone() for value in model.state_dict().values()],
    "state_dict of a child": lambda model: [
        *(value.clone() for value in model[0].state_dict().values()),
        *(value.clone() for value in model[2].state_dict().values()),
    ],
}


def clamp_data(model):
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamp(model):
    for p in model.parameters():
        p.clamp_(-0.1, 0.1)


@torch.no_grad()
def clamp_all(model):
    torch._foreach_clamp_max_(list(model.parameters()), 0.1)


def load(model):
    model.load_state_dict({name: torch.full_like(p, 0.5) for name, p in model.state_dict().items()})


def load_children(model):
    for child in (model[0], model[2]):
        child.load_state_dict({name: torch.full(p.shape, 0.5) for name, p in child.named_parameters()})


WRITES = (clamp_data, clamp, clamp_all, load, load_children)


class Late:
    """A gather that brings its values when somebody waits for it, over whatever is there."""

    def __init__(self, weights):
        self.weights, self.values = weights, weights.unsharded.clone()
        weights.unsharded.fill_(float("nan"))

    def wait(self):
        self.weights.unsharded.copy_(self.values)


def stepped(late):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = shard_optimizer(inner, None, model=model, overlap_gather=late)
    advance(model, optimizer)
    if late:
        optimizer.wait_gathered()
        for chunk in optimizer.chunks:
            chunk.weights.gathering = Late(chunk.weights)
            arriving(chunk.params)
    return model, optimizer


def advance(model, optimizer):
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("read", READS)
def test_reading_waits(read):
    (usual, _), (late, _) = stepped(late=False), stepped(late=True)
    for a, b in zip(READS[read](usual), READS[read](late), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("write", WRITES)
def test_writing_waits(write):
    (usual, one), (late, other) = stepped(late=False), stepped(late=True)
    for model, optimizer in ((usual, one), (late, other)):
        write(model)
        advance(model, optimizer)
    for a, b in zip(usual.parameters(), late.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_forward_meets_usual_parameters():
    model, optimizer = stepped(late=True)
    model(torch.ones(2, 4))
    assert {type(p) for p in model.parameters()} == {ShownParameter}
    optimizer.step()
    assert ShownParameter not in {type(p) for p in model.parameters()}
