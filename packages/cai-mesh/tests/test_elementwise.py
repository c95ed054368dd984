"""Optimizers that may step parts of parameters are told from those that may not by trying them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.storage import check_elementwise

MIXES, UNTRIED = "does not treat elements independently", "cannot be tried"


def params():
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(5))]


def stepped(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


class Normalised(torch.optim.SGD):
    """One norm over all parameters (Hazan et al., arXiv:1507.02030)."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = torch.stack([p.grad.norm() for p in stepped(self)]).norm()
        for p in stepped(self):
            p.grad.div_(norm)
        super().step()


class ClipsInside(torch.optim.SGD):
    """As apex's LAMB and transformers' older AdamW do; small gradients pass unchanged."""

    @torch.no_grad()
    def step(self, closure=None):
        nn.utils.clip_grad_norm_(stepped(self), 1.0)
        super().step()


class FindsItsRate(torch.optim.Optimizer):
    """A distance from the start, one number over all parameters, is the rate (D-Adaptation, Prodigy)."""

    def __init__(self, params, lr=1.0, d0=1e-6):
        super().__init__(params, {"lr": lr, "d0": d0})
        self.d = d0

    @torch.no_grad()
    def step(self, closure=None):
        above = below = 0.0
        for p in stepped(self):
            state = self.state[p]
            if not state:
                state["start"], state["sum"] = p.detach().clone(), torch.zeros_like(p)
            above += float((p.grad * (state["start"] - p)).sum())
            state["sum"].add_(p.grad)
            below += float(state["sum"].abs().sum())
        self.d = max(self.d * 1.5, above / max(below, 1e-12))
        self.d = self.d if below < 100 else self.d * 2
        for p in stepped(self):
            p.sub_(p.grad.sign(), alpha=self.d * self.param_groups[0]["lr"])


class DecaysMatrices(torch.optim.SGD):
    """Decay by the number of dimensions, inside: a flat part has one."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in stepped(self):
            if p.ndim > 1:
                p.mul_(0.99)
        super().step()


class Centralised(torch.optim.SGD):
    """Gradient centralisation (Yong et al., arXiv:2004.01461)."""

    @torch.no_grad()
    def step(self, closure=None):
        for p in stepped(self):
            if p.ndim > 1:
                p.grad.sub_(p.grad.mean(dim=1, keepdim=True))
        super().step()


class BoundedUpdates(torch.optim.Optimizer):
    """Updates bounded by their root mean square (StableAdamW, Wortsman et al., arXiv:2304.13013)."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p in stepped(self):
            square = self.state[p].setdefault("square", torch.zeros_like(p)).lerp_(p.grad**2, 0.05)
            size = (p.grad**2 / square.clamp(min=1e-12)).mean().sqrt().clamp(min=1.0)
            p.addcdiv_(p.grad, square.sqrt() + 1e-8, value=-self.param_groups[0]["lr"] / float(size))


class ByGroup(torch.optim.Optimizer):
    """Rows only where a group says so, as Muon with AdamW for the rest."""

    def __init__(self, params, lr=1e-2, rows=False):
        super().__init__(params, {"lr": lr, "rows": rows})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                size = p.grad.norm(dim=-1, keepdim=True) if group["rows"] else p.grad.abs()
                p.addcdiv_(p.grad, size + 1e-8, value=-group["lr"])


class NeedsMore(torch.optim.SGD):
    """Built with what no group and no attribute has."""

    def __init__(self, params, lr, model):
        super().__init__(params, lr=lr)


class WithAttribute(torch.optim.SGD):
    def __init__(self, params, lr, by_rows):
        super().__init__(params, lr=lr)
        self.by_rows = by_rows

    @torch.no_grad()
    def step(self, closure=None):
        if self.by_rows:
            for p in stepped(self):
                p.grad.div_(p.grad.norm())
        super().step()


ALIKE = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adam": torch.optim.Adam,
    "a rate in a tensor": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), foreach=False),
    "AdamW, fused, amsgrad": lambda p: torch.optim.AdamW(p, fused=True, amsgrad=True),
    **{
        name: getattr(torch.optim, name)
        for name in ("RMSprop", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "Rprop", "ASGD")
    },
    "groups": lambda p: torch.optim.AdamW([{"params": p[:1]}, {"params": p[1:], "weight_decay": 0.0}]),
    "by group, none by rows": lambda p: ByGroup([{"params": p[:1]}, {"params": p[1:]}]),
    "an attribute that is off": lambda p: WithAttribute(p, 0.1, False),
}
REFUSED = {
    "Adafactor": (torch.optim.Adafactor, MIXES),
    "normalised": (lambda p: Normalised(p, lr=0.1), MIXES),
    "normalised in groups": (
        lambda p: Normalised([{"params": p[:1]}, {"params": p[1:], "lr": 0.2}], lr=0.1),
        MIXES,
    ),
    "clips inside": (lambda p: ClipsInside(p, lr=0.1), MIXES),
    "finds its rate": (FindsItsRate, MIXES),
    "decays matrices": (lambda p: DecaysMatrices(p, lr=0.1), MIXES),
    "centralised": (lambda p: Centralised(p, lr=0.1), MIXES),
    "bounded updates": (BoundedUpdates, MIXES),
    "by group, one by rows": (lambda p: ByGroup([{"params": p[:1], "rows": True}, {"params": p[1:]}]), MIXES),
    "an attribute that is on": (lambda p: WithAttribute(p, 0.1, True), MIXES),
    "LBFGS": (torch.optim.LBFGS, "several times a step"),
    "SparseAdam": (torch.optim.SparseAdam, UNTRIED),
    "needs more": (lambda p: NeedsMore(p, 0.1, None), UNTRIED),
}


@pytest.mark.parametrize("name", ALIKE)
def test_what_treats_elements_alike_passes(name):
    check_elementwise(ALIKE[name](params()))


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_them_or_cannot_be_tried_is_refused(name):
    make, says = REFUSED[name]
    with pytest.raises(PlanError, match=says):
        check_elementwise(make(params()))


def test_what_cannot_be_tried_may_say_that_it_does():
    optimizer = NeedsMore(params(), 0.1, None)
    optimizer.elementwise = True
    check_elementwise(optimizer)


def test_a_trial_changes_nothing():
    optimizer = Normalised(params(), lr=0.1)
    before = [p.detach().clone() for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(PlanError, match=MIXES):
        check_elementwise(optimizer)
    assert not optimizer.state
    after = optimizer.param_groups[0]["params"]
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(after, before, strict=True))
