"""Adafactor equals torch's, and CAME its formula, on full tensors, however the parameters are divided."""

from __future__ import annotations

import pytest
import torch
import toy

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_zero.optimizers import Adafactor, Came

ADAFACTOR = {"lr": 0.05, "beta2_decay": -0.7, "eps": (None, 1e-3), "d": 1.1, "weight_decay": 0.1}
CAME = {"lr": 0.02, "betas": (0.9, 0.99, 0.999), "clip": 0.9, "weight_decay": 0.1}


def adafactor(model, mesh):
    return Adafactor(toy.groups_of(model, lr=0.2, eps=(1e-4, 1e-2)), **ADAFACTOR, mesh=mesh)


def torch_adafactor(params):
    rest = [p for n, p in params.items() if n != "embed"]
    groups = [{"params": rest}, {"params": [params["embed"]], "lr": 0.2, "eps": (1e-4, 1e-2)}]
    return [torch.optim.Adafactor(groups, **ADAFACTOR)]


def came(model, mesh):
    return Came(model.parameters(), **CAME, mesh=mesh)


def came_formula(name, p, grad, state, step):
    """Written per matrix, with outer products of full rows and columns."""
    b1, b2, b3 = CAME["betas"]
    squares = grad**2 + 1e-30
    if p.ndim < 2:
        state["v"] = b2 * state.get("v", 0) + (1 - b2) * squares
        u = grad / state["v"].sqrt()
    else:
        u = grad / root(state, "v", squares, b2)
    u = u / max(1.0, float(u.square().mean().sqrt()) / CAME["clip"])
    m = state["m"] = b1 * state.get("m", 0) + (1 - b1) * u
    if p.ndim >= 2:
        m = m / root(state, "s", (u - m) ** 2 + 1e-16, b3)
    return p * (1 - CAME["lr"] * CAME["weight_decay"]) - CAME["lr"] * m


def root(state, slot, squares, beta):
    rows = state[slot + "r"] = beta * state.get(slot + "r", 0) + (1 - beta) * squares.mean(-1)
    columns = state[slot + "c"] = beta * state.get(slot + "c", 0) + (1 - beta) * squares.mean(-2)
    mean = rows.mean(-1)[..., None, None]
    return (torch.einsum("...r,...c->...rc", rows, columns) / mean).sqrt()


MAKERS = {"adafactor": adafactor, "came": came}


def expected_of(name):
    return toy.torch_twin(torch_adafactor) if name == "adafactor" else toy.twin(came_formula)


def sharded(name, stages, shape):
    return toy.sharded(MAKERS[name], stages, shape)


@pytest.mark.parametrize("name", list(MAKERS))
def test_one_process(name):
    toy.compare(toy.one_process(MAKERS[name]), expected_of(name))


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize(("shape", "stages"), toy.LAYOUTS)
def test_equals_full_tensors(name, shape, stages):
    expected = expected_of(name)
    for found in run_ranks(toy.ranks(shape), sharded, name, stages, shape):
        for stage in stages:
            toy.compare(found[stage], expected)


@pytest.mark.parametrize(("kind", "vectors"), [(Adafactor, 2), (Came, 4)])
def test_state_is_vectors(kind, vectors):
    param = torch.nn.Parameter(torch.randn(40, 30))
    optimizer = kind([param])
    param.square().sum().backward()
    optimizer.step()
    held = sum(t.numel() for v in optimizer.state[param].values() if isinstance(v, list) for t in v)
    assert held == vectors // 2 * 70 + (1200 if kind is Came else 0)


@pytest.mark.parametrize("kind", [Adafactor, Came])
def test_bfloat16_parameters_keep_float32_state(kind):
    param = torch.nn.Parameter(torch.randn(8, 6, dtype=torch.bfloat16))
    before = param.detach().clone()
    optimizer = kind([param], lr=0.1)
    param.grad = torch.randn(8, 6, dtype=torch.bfloat16)
    optimizer.step()
    kinds = {t.dtype for v in optimizer.state[param].values() if isinstance(v, list) for t in v}
    assert kinds == {torch.float32} and param.dtype == torch.bfloat16 and not torch.equal(param, before)


def test_options_out_of_range():
    param = torch.nn.Parameter(torch.zeros(2))
    for kind, options in (
        (Adafactor, {"beta2_decay": 0.5}),
        (Adafactor, {"d": -1.0}),
        (Adafactor, {"eps": (None, -1.0)}),
        (Came, {"betas": (0.9, 0.9, 1.0)}),
        (Came, {"clip": -1.0}),
    ):
        with pytest.raises(PlanError, match=f"{kind.__name__}: {next(iter(options))}"):
            kind([param], **options)
