"""Muon equals full matrices orthogonalised through their singular values, and torch's Muon, however divided."""

from __future__ import annotations

import math

import pytest
import torch
import toy

from cai_mesh.errors import PlanError
from cai_mesh.testing import run_ranks
from cai_zero.optimizers import Muon, NewtonSchulz
from cai_zero.optimizers.exchange import divide

LR, MOMENTUM, DECAY, BETAS, EPS = 0.05, 0.9, 0.1, (0.9, 0.95), 1e-8
EXACT = NewtonSchulz(dtype=None)


def muon(model, mesh):
    groups = toy.groups_of(model, ("embed",), use_muon=False, lr=0.01)
    return Muon(
        groups, LR, MOMENTUM, weight_decay=DECAY, betas=BETAS, eps=EPS, newton_schulz=EXACT, mesh=mesh
    )


def plain_momentum(model, mesh):
    groups = toy.groups_of(model, ("embed",), use_muon=False, lr=0.01)
    return Muon(groups, LR, MOMENTUM, False, DECAY, scale="match_rms_adamw", newton_schulz=EXACT, mesh=mesh)


MAKERS = {"nesterov": muon, "plain": plain_momentum}


def formula(kind):
    def update(name, p, grad, state, step):
        if p.ndim != 2 or name == "embed":
            return adamw(p, grad, state, step, 0.01 if name == "embed" else LR)
        m = state["m"] = MOMENTUM * state.get("m", torch.zeros_like(p)) + (1 - MOMENTUM) * grad
        rows, columns = p.shape
        rate = LR * (max(1, rows / columns) ** 0.5 if kind == "nesterov" else 0.2 * max(rows, columns) ** 0.5)
        u = MOMENTUM * m + (1 - MOMENTUM) * grad if kind == "nesterov" else m
        return p * (1 - LR * DECAY) - rate * by_singular_values(u)

    return update


def by_singular_values(matrix):
    """The iterations applied to every singular value."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    s = s / s.square().sum().sqrt().clamp(min=1e-7)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ torch.diag(s) @ v


def adamw(p, grad, state, step, lr):
    m = state["m"] = BETAS[0] * state.get("m", 0) + (1 - BETAS[0]) * grad
    v = state["v"] = BETAS[1] * state.get("v", 0) + (1 - BETAS[1]) * grad**2
    u = (m / (1 - BETAS[0] ** step)) / ((v / (1 - BETAS[1] ** step)).sqrt() + EPS)
    return p * (1 - lr * DECAY) - lr * u


def sharded(name, stages, shape):
    return toy.sharded(MAKERS[name], stages, shape)


@pytest.mark.parametrize("name", list(MAKERS))
def test_one_process(name):
    toy.compare(toy.one_process(MAKERS[name]), toy.twin(formula(name)))


@pytest.mark.parametrize("name", list(MAKERS))
@pytest.mark.parametrize(("shape", "stages"), toy.LAYOUTS)
def test_equals_full_tensors(name, shape, stages):
    expected = toy.twin(formula(name))
    for found in run_ranks(toy.ranks(shape), sharded, name, stages, shape):
        for stage in stages:
            toy.compare(found[stage], expected)


@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_equals_torch_in_bfloat16(scale, nesterov):
    torch.manual_seed(1)
    mine = [torch.nn.Parameter(torch.randn(s)) for s in ((16, 8), (8, 16), (16, 8), (5, 7))]
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in mine]
    options = {"lr": 0.02, "momentum": 0.9, "nesterov": nesterov, "weight_decay": 0.1}
    ours = Muon(mine, **options, scale=scale)
    reference = torch.optim.Muon(theirs, **options, adjust_lr_fn=scale)
    for step in range(10):
        for i, (p, q) in enumerate(zip(mine, theirs, strict=True)):
            p.grad = torch.randn(p.shape, generator=toy.generator(i, step))
            q.grad = p.grad.clone()
        ours.step()
        reference.step()
    for p, q in zip(mine, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=2e-3)


def test_singular_values_after_five_steps():
    torch.manual_seed(0)
    values = torch.linalg.svdvals(NewtonSchulz(dtype=None)(torch.randn(3, 20, 30))).flatten()
    assert float(values.min()) > 0.6 and float(values.max()) < 1.3
    slow = NewtonSchulz((2.0, -1.5, 0.5), steps=60, dtype=None)
    found = slow(torch.randn(1, 9, 5, dtype=torch.float64))[0]
    torch.testing.assert_close(found.mT @ found, torch.eye(5, dtype=torch.float64), rtol=0, atol=1e-9)


def test_work_is_divided_evenly():
    costs = [7, 1, 1, 5, 3, 3, 4]
    chosen = divide(costs, 3)
    loads = [sum(c for c, w in zip(costs, chosen, strict=True) if w == worker) for worker in range(3)]
    assert sorted(loads) == [8, 8, 8]
    assert divide([1, 1], 4) == [0, 1]
    assert divide([], 2) == []


def counts(stage):
    calls = []
    _, optimizer, _ = model = toy.built(muon, stage, (2,))
    toy.advance(*model, range(1))
    inner = getattr(optimizer, "inner", optimizer)
    kept = inner.newton_schulz
    shapes = []

    class Counting(NewtonSchulz):
        def __call__(self, matrices):
            shapes.extend([tuple(matrices.shape[1:])] * len(matrices))
            return super().__call__(matrices)

    inner.newton_schulz = Counting(dtype=None)
    original = torch.distributed.all_to_all_single
    from cai_mesh.comm import collectives

    def counted(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    collectives._all_to_all = counted
    try:
        toy.advance(*model, range(1, 2))
    finally:
        collectives._all_to_all = original
        inner.newton_schulz = kept
    return shapes, len(calls)


@pytest.mark.parametrize("stage", [1, 3])
def test_every_matrix_is_worked_on_once(stage):
    (first, calls), (second, _) = run_ranks(2, counts, stage)
    expected = [s for n, (s, _) in toy.SHAPES.items() if len(s) == 2 and n != "embed"]
    assert sorted(first + second) == sorted(expected)
    assert first and second and calls == 2


def test_matrices_of_one_shape_go_together():
    params = [torch.nn.Parameter(torch.randn(6, 4)) for _ in range(3)]
    alone = [torch.nn.Parameter(p.detach().clone()) for p in params]
    optimizer = Muon(params, newton_schulz=EXACT)
    for p, q in zip(params, alone, strict=True):
        p.grad = torch.randn(6, 4)
        q.grad = p.grad.clone()
        Muon([q], newton_schulz=EXACT).step()
    optimizer.step()
    for p, q in zip(params, alone, strict=True):
        torch.testing.assert_close(p, q)


def test_options_and_parameters_that_do_not_work():
    param = torch.nn.Parameter(torch.zeros(2, 2))
    with pytest.raises(PlanError, match="unknown scale"):
        Muon([param], scale="mine")
    with pytest.raises(PlanError, match="Muon: momentum"):
        Muon([param], momentum=1.5)
    with pytest.raises(PlanError, match="three coefficients"):
        NewtonSchulz((1.0, 2.0))
    with pytest.raises(PlanError, match="dtype"):
        NewtonSchulz(dtype=torch.int32)
    for dtype in (torch.int32, torch.complex64):
        odd = torch.nn.Parameter(torch.zeros(2, 2, dtype=dtype), requires_grad=False)
        with pytest.raises(PlanError, match="Muon cannot step"):
            Muon([odd])
    assert math.isfinite(float(param.sum().detach()))
