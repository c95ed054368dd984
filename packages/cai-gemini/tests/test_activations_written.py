"""Blocks that write to what they are given are right as in a plain loop, or refused."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

from cai_gemini import offload_activations
from cai_mesh.errors import PlanError

DEPTH = 4


@dataclass
class State:
    """What blocks hand on beside their hidden states."""

    count: int = 0
    seen: list[torch.Tensor] = field(default_factory=list)


class Block(nn.Module):
    """Writes to its arguments in one way or another, with nothing that autograd has kept."""

    def __init__(self, writes):
        super().__init__()
        self.inner, self.writes = nn.Linear(6, 6), writes

    def forward(self, x, scale, box, table, state):
        y = torch.tanh(self.inner(x.clone()))
        return getattr(self, self.writes)(x, y, scale, box, table, state)

    def added(self, x, y, *_):
        x += y
        return x

    def copied(self, x, y, *_):
        return x.copy_(y + x)

    def a_row(self, x, y, *_):
        x[0] = y[0]
        return x + y

    def data(self, x, y, *_):
        x.data.mul_(0.5)
        return x + y

    def data_of_another(self, x, y, scale, *_):
        scale.data.add_(1)
        return x + y * scale.clone()

    def counter(self, x, y, scale, *_):
        with torch.no_grad():
            scale.add_(1)
        return x + y * scale.clone()

    def listed(self, x, y, scale, box, *_):
        box.append(y.square().mean())
        return x + y

    def list_read(self, x, y, scale, box, *_):
        before = sum(box[-2:])
        box.append(y.mean(0))
        return x + y + before

    def mapped(self, x, y, scale, box, table, _):
        table[f"aux{len(table)}"] = y.abs().mean()
        return x + y * len(table)

    def counted(self, x, y, scale, box, table, state):
        state.count += 1
        return x + y * state.count

    def handed_on(self, x, y, scale, box, table, state):
        before = sum(each.mean() for each in state.seen)
        state.seen.append(y)
        return x + y + before


class Net(nn.Module):
    def __init__(self, writes, where):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6)
        self.layers = nn.ModuleList(Block(writes if i in where else "listed") for i in range(DEPTH))

    def forward(self, ids):
        x, box, table, state = self.embed(ids) * 1.0, [], {}, State()
        scale = torch.ones(6)
        for layer in self.layers:
            x = layer(x, scale, box, table, state)
        aux = [*box, *table.values(), *state.seen]
        return x.square().mean() + sum(each.mean() for each in aux) + len(aux) + state.count


TENSORS = ("added", "copied", "a_row", "data", "data_of_another", "counter")
OBJECTS = ("listed", "list_read", "mapped", "counted", "handed_on")
"""As routers' losses, hidden states, DenseNet's features and caches are collected in published models."""
OPTIONS = ({}, {"smallest": 0}, {"smallest": 0, "keep": 0})


def results(model, *args, **kwargs):
    loss = model(*args, **kwargs)
    loss = loss if isinstance(loss, torch.Tensor) else loss.loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("where", [range(DEPTH), (0,), (DEPTH - 1,)])
@pytest.mark.parametrize("writes", TENSORS)
def test_a_block_that_writes_to_a_tensor_is_refused(writes, where, options):
    model = Net(writes, where)
    offload_activations(model, **options)
    with pytest.raises(PlanError, match="an input of a block was changed in place"):
        results(model, torch.arange(9))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("writes", OBJECTS)
def test_what_a_block_puts_into_lists_and_objects_is_there(writes, options):
    model = Net(writes, range(DEPTH))
    plain = copy.deepcopy(model)
    offload_activations(model, **options)
    for _ in range(2):
        for got, expected in zip(
            results(model, torch.arange(9)), results(plain, torch.arange(9)), strict=True
        ):
            assert torch.equal(got, expected)
