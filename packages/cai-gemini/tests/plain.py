"""The plain loop that offloaded training is compared on: weights in a dtype of computation, and master weights."""

from __future__ import annotations

import copy

import torch
from offloaded import Net, groups
from torch import nn


class Failed(RuntimeError):
    """A backward that was made to fail."""


class Fragile(Net):
    """A `Net` whose backward can be made to fail half-way, before block `fails`."""

    fails: int | None = None

    def forward(self, ids, skip):
        x = self.embed(ids)
        for i, layer in enumerate(self.layers):
            x = layer(x) if i != 2 or not skip else x
            if i == self.fails and x.requires_grad:
                x.register_hook(fail)
        return self.head(x)


def fail(_gradient):
    raise Failed("half-way")


def fragile():
    torch.manual_seed(0)
    return Fragile()


def loss_of(net, seed, skip, factor=1.0):
    ids = torch.randint(0, 9, (3, 5), generator=torch.Generator().manual_seed(seed))
    return factor * nn.functional.cross_entropy(net(ids, skip).flatten(0, 1).float(), ids.flatten())


class Plain:
    """Torch's own loop over a copy of `model`.

    Args:
        optimizer: from param groups.
        compute: the model's dtype; gradients of several backwards are summed in float32.
    """

    def __init__(self, model, optimizer, compute=torch.float32):
        masters = copy.deepcopy(model)
        self.names = [n for n, _ in masters.named_parameters()]
        self.masters = list(masters.parameters())
        self.optimizer = optimizer(groups(masters))
        self.model = copy.deepcopy(model).to(compute)
        self.gradients: list[torch.Tensor | None] = [None] * len(self.masters)

    def backward(self, seed, skip, factor=1.0):
        loss = loss_of(self.model, seed, skip, factor)
        loss.backward()
        for i, param in enumerate(self.model.parameters()):
            if param.grad is not None:
                before, more = self.gradients[i], param.grad
                self.gradients[i] = more if before is None else before.float() + more.float()
                param.grad = None
        return loss.item()

    def norm(self):
        found = [g.double().square().sum() for g in self.gradients if g is not None]
        return torch.stack(found).sum().sqrt()

    def scale(self, factor):
        """Gradients of the first step are those of one dtype; a scale of 1 changes nothing."""
        self.gradients = [None if g is None else g.float() * factor for g in self.gradients]

    def step(self):
        for master, gradient in zip(self.masters, self.gradients, strict=True):
            master.grad = None if gradient is None else gradient.to(master.dtype)
        self.optimizer.step()
        self.show(self.masters)
        self.zero_grad()

    @torch.no_grad()
    def show(self, values):
        """Let the model compute with these weights."""
        for param, value in zip(self.model.parameters(), values, strict=True):
            param.copy_(value)

    def zero_grad(self):
        self.model.zero_grad()
        self.gradients = [None] * len(self.masters)


def assert_same(model, optimizer, plain):
    """Weights, and the optimizer's state where the plain one has any, bit for bit."""
    for name, ours, theirs in zip(plain.names, model.parameters(), plain.masters, strict=True):
        assert torch.equal(ours.detach().view(theirs.shape), theirs.detach()), name
    mine, wanted = optimizer.state_dict(), plain.optimizer.state_dict()
    assert mine["param_groups"] == wanted["param_groups"]
    for index, state in wanted["state"].items():
        assert mine["state"][index].keys() == state.keys()
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(mine["state"][index][key].flatten(), value.flatten()), (index, key)
            else:
                assert mine["state"][index][key] == value, (index, key)
