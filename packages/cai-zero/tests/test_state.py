"""State that an optimizer has not made yet is made without much memory, and changes nothing."""

import pytest
import torch
from torch import nn

from cai_zero import state


class Counting(torch.optim.Optimizer):
    """Keeps a moment and a whole number of a parameter, and counts steps in its group, as apex's optimizers do."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.5, "weight_decay": 0.1, "t": 7})
        self.stepped = []

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["t"] += 1
            grads = [p for p in group["params"] if p.grad is not None]
            self.stepped.append(sum(p.nbytes for p in grads))
            for p in grads:
                kept = (
                    self.state[p] or self.state[p].update(step=0, moment=torch.zeros_like(p)) or self.state[p]
                )
                kept["step"] += 1
                kept["moment"].mul_(0.9).add_(p.grad + group["weight_decay"] * p)
                p.sub_(group["lr"] * kept["moment"] + 1.0)


@pytest.fixture
def params(monkeypatch):
    monkeypatch.setattr(state, "AT_ONCE", 1024)
    return [nn.Parameter(torch.randn(size)) for size in (100, 100, 100, 1000, 10, 200)]


def test_steps_are_of_few_parameters_and_change_nothing(params):
    optimizer = Counting(params)
    before = [p.detach().clone() for p in params]
    params[1].grad = torch.full((100,), 3.0)
    state.initialize_state(optimizer)
    assert optimizer.stepped == [800, 400, 4000, 840], "at most 1,024 bytes, or one parameter"
    assert all(torch.equal(p, value) for p, value in zip(params, before, strict=True))
    assert [None if p.grad is None else p.grad[0].item() for p in params] == [
        None,
        3.0,
        None,
        None,
        None,
        None,
    ]
    assert all(optimizer.state[p]["step"] == 0 and not optimizer.state[p]["moment"].any() for p in params)
    group = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    assert group == {"lr": 0.5, "weight_decay": 0.1, "t": 7, "step": 0}


def test_only_what_lacks_state_is_stepped(params):
    optimizer = torch.optim.AdamW(params, lr=0.1)
    for p in params[:2]:
        p.grad = torch.ones_like(p)
    optimizer.step()
    moments = [optimizer.state[p]["exp_avg"].clone() for p in params[:2]]
    state.initialize_state(optimizer)
    assert [int(optimizer.state[p]["step"]) for p in params] == [1, 1, 0, 0, 0, 0]
    assert all(
        torch.equal(optimizer.state[p]["exp_avg"], m) for p, m in zip(params[:2], moments, strict=True)
    )
