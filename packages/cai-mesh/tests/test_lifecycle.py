"""What listeners are told, and in which order, around forward, backward, recompute and failures."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from cai_mesh.storage import ModuleLifecycle


class Recorder:
    def __init__(self, names):
        self.names, self.events = names, []

    def before_use(self, unit, *, backward):
        self.events.append(("<" if backward else ">") + self.names[unit])

    def after_use(self, unit):
        self.events.append("/" + self.names[unit])

    def grads_ready(self, unit):
        ready = all(p.grad is not None for p in unit.parameters() if p.requires_grad)
        self.events.append("=" + self.names[unit] + ("" if ready else "?"))

    def backward_done(self):
        self.events.append(".")

    def take(self):
        events, self.events = self.events, []
        return " ".join(events)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x)))


def watched(model, *extra):
    units = {model.a: "a", model.b: "b"}
    lifecycle = ModuleLifecycle({m: list(m.parameters()) for m in units})
    recorder = Recorder(units)
    lifecycle.listen(recorder)
    return lifecycle, recorder


X = torch.ones(2, 3)
PLAIN = ">a /a >b /b <b =b <a =a ."


def test_plain_and_no_grad():
    model = Pair()
    names = [n for n, _ in model.named_parameters()]
    _, seen = watched(model)
    for _ in range(2):
        model(X).sum().backward()
        assert seen.take() == PLAIN
    with torch.no_grad():
        model(X)
    assert seen.take() == ">a /a >b /b"
    assert [n for n, _ in model.named_parameters()] == names


def test_recompute_is_a_use_in_backward_without_an_end_of_its_own():
    model = Pair()
    _, seen = watched(model)
    checkpoint(model, X, use_reentrant=False).sum().backward()
    events = seen.take()
    assert events.startswith(">a /a >b /b <b")
    assert events.endswith(".")
    backward = events.split("/b ", 1)[1]
    assert "/" not in backward
    assert backward.index("<a") < backward.index("=a")
    assert (backward.count("=a"), backward.count("=b")) == (1, 1)


def test_a_frozen_unit_ends_with_its_inputs():
    model = Pair()
    model.b.requires_grad_(False)
    _, seen = watched(model)
    model(X).sum().backward()
    assert seen.take() == PLAIN
    model.b.requires_grad_(True)


def test_an_unused_parameter_is_not_waited_for():
    model = Pair()
    model.b.extra = nn.Parameter(torch.zeros(1))
    _, seen = watched(model)
    model(X).sum().backward()
    assert seen.take() == ">a /a >b /b <b =b? <a =a ."


def test_a_unit_used_twice_ends_once():
    model = Pair()
    _, seen = watched(model)
    model.a(torch.tanh(model.a(X))).sum().backward()
    assert seen.take() == ">a /a >a /a <a <a =a ."


def test_several_microbatches_in_flight():
    model = Pair()
    _, seen = watched(model)
    first, second = model(X).sum(), model(X).sum()
    seen.take()
    first.backward()
    second.backward()
    assert seen.take() == "<b =b <a =a . <b =b <a =a ."


def test_after_an_exception_in_backward_the_next_step_is_whole():
    model = Pair()
    _, seen = watched(model)
    out = torch.tanh(model.a(X))
    out.register_hook(lambda grad: (_ for _ in ()).throw(RuntimeError("half-way")))
    with pytest.raises(RuntimeError, match="half-way"):
        model.b(out).sum().backward()
    assert "." not in seen.take()
    model.zero_grad()
    model(X).sum().backward()
    assert seen.take() == PLAIN


def test_listeners_in_order_and_detach():
    model = Pair()
    lifecycle, first = watched(model)
    second = Recorder(first.names)
    second.events = first.events
    lifecycle.listen(second)
    model(X)
    assert first.take() == ">a >a /a /a >b >b /b /b"
    lifecycle.detach()
    model(X).sum().backward()
    assert first.take() == ""
    assert not model.a._forward_hooks
    assert not model.a._forward_pre_hooks
