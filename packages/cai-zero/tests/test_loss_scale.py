"""Loss scaling against `torch.amp.GradScaler` on one process, and float16 on ranks against float32 on one."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from zero_models import Language, train_plainly

from cai_mesh.errors import MeshError, PlanError
from cai_mesh.gradients import clip_grad_norm_, flat_of, local_gradient
from cai_mesh.layout import Layout, Shard, Step, attach
from cai_mesh.testing import run_ranks
from cai_zero import LossScale, MixedPrecision, shard_module, shard_optimizer, sharding_of

HALF = MixedPrecision(compute=torch.float16)


def build():
    torch.manual_seed(5)
    return Language(12, 16, 2, norm=False)


def loss_of(model, step, rank=0, world=1):
    ids = torch.randint(0, 12, (8, 7), generator=torch.Generator().manual_seed(step))
    ids = ids[rank * 8 // world : (rank + 1) * 8 // world]
    return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1).float(), ids[:, 1:].flatten())


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused-sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "fused-adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "fused-adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, fused=True),
}


# -- one process, beside torch's own -----------------------------------------------------------------------------


def train_with(scaler, optimizer_name, bad_steps):
    model = build()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    scales = []
    for step in range(12):
        scaler.scale(loss_of(model, step) * (math.inf if step in bad_steps else 1.0)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(float(scaler.state_dict()["scale"]))
    return scales, [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "fused-adamw", "fused-adagrad"])
def test_is_grad_scaler_on_one_process(optimizer):
    bad = {2, 3, 8}
    theirs = torch.amp.GradScaler(
        "cpu", init_scale=512.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3
    )
    ours = LossScale(initial=512.0, growth=4.0, backoff=0.25, interval=3)
    expected_scales, expected = train_with(theirs, optimizer, bad)
    scales, got = train_with(ours, optimizer, bad)
    assert scales == expected_scales
    assert scales == [512.0, 512.0, 128.0, 32.0, 32.0, 32.0, 128.0, 128.0, 32.0, 32.0, 32.0, 128.0]
    assert ours.skipped == 3
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_fused_sgd_does_not_start_from_uninitialized_memory():
    scales, got = train_with(LossScale(initial=512.0), "fused-sgd", {0})
    expected_scales, expected = train_with(LossScale(initial=512.0), "sgd", {0})
    assert scales == expected_scales
    for a, b in zip(got, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("optimizer", "waits"), [("fused-adamw", 0), ("adamw", 1)])
def test_how_often_a_step_waits_for_the_device(optimizer, waits, monkeypatch):
    model = build()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    scale, calls = LossScale(initial=8.0), []
    scale.scale(loss_of(model, 0)).backward()
    scale.unscale_(optimizer)
    for name in ("item", "__bool__", "__float__", "__int__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda t, f=plain: (calls.append(t.shape), f(t))[1])
    with monkeypatch.context() as inside:
        inside.setattr(
            type(optimizer), "step", lambda self: None
        )  # torch's own step looks at its CPU step counts
        scale.step(optimizer)
    scale.update()
    assert len(calls) == waits
    assert not hasattr(optimizer, "found_inf")


def test_a_resume_goes_on_with_the_same_scale():
    first = LossScale(initial=64.0, interval=3)
    model = build()
    optimizer = OPTIMIZERS["sgd"](model.parameters())

    def go(scale, factor):
        scale.scale(loss_of(model, 0) * factor).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()

    for factor in (1.0, math.nan, 1.0, 1.0):
        go(first, factor)
    assert first.state_dict() == {"scale": 32.0, "good_steps": 2, "skipped": 1}
    second = LossScale(interval=3)
    second.load_state_dict(first.state_dict())
    go(second, 1.0)
    assert second.state_dict() == {"scale": 64.0, "good_steps": 0, "skipped": 1}


# -- float16 on ranks --------------------------------------------------------------------------------------------


def sharded(stage, name, mesh):
    model = build()
    if stage == 3:
        shard_module(model, mesh, precision=HALF)
        return model, OPTIMIZERS[name](model.parameters())
    inner = OPTIMIZERS[name](model.parameters())
    return model, shard_optimizer(inner, mesh, model=model, stage=stage, precision=HALF)


def clip(optimizer, model, mesh, max_norm):
    if hasattr(optimizer, "clip_grad_norm_"):
        return float(optimizer.clip_grad_norm_(max_norm))
    return float(clip_grad_norm_(model.parameters(), max_norm, mesh))


def half_precision(stage, name, good_steps, initial):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, optimizer = sharded(stage, name, mesh)
    assert next(p for p in model.parameters() if p.numel()).dtype == (
        torch.float32 if stage == 3 else torch.float16
    )
    scale = LossScale(mesh, initial=initial, interval=1000)
    taken, scales, norms, losses = [], [], [], []
    while sum(taken) < good_steps and len(taken) < 60:
        loss = loss_of(model, sum(taken), dist.get_rank(), 2)
        scale.scale(loss).backward()
        scale.unscale_(optimizer)
        norm = clip(optimizer, model, mesh, 0.5)
        before = scale.skipped
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        taken.append(scale.skipped == before)
        scales.append(scale.value)
        if taken[-1]:
            norms.append(norm)
            total = loss.detach()
            dist.all_reduce(total)
            losses.append(float(total) / 2)
    return taken, scales, norms, losses


def single_precision(name, steps):
    model = build()
    return train_plainly(model, OPTIMIZERS[name](model.parameters()), loss_of, steps, clip=0.5)


@pytest.mark.parametrize(
    ("stage", "optimizer"), [(0, "adamw"), (1, "fused-adamw"), (2, "sgd"), (3, "sgd"), (3, "fused-adamw")]
)
def test_float16_backs_off_and_then_trains_like_float32(stage, optimizer):
    steps, initial = 15, 2.0**40
    losses, norms = single_precision(optimizer, steps)
    first, second = run_ranks(2, half_precision, stage, optimizer, steps, initial)
    assert first == second
    taken, scales, got_norms, got_losses = first
    skipped = taken.index(True)
    assert skipped >= 10
    assert all(taken[skipped:])
    assert scales == [initial / 2 ** min(i + 1, skipped) for i in range(len(scales))]
    assert torch.allclose(torch.tensor(got_losses), torch.tensor(losses), rtol=5e-3, atol=0)
    assert torch.allclose(torch.tensor(got_norms), torch.tensor(norms), rtol=2e-2, atol=0)
    assert losses[-1] < losses[0]


def underflow(initial):
    """Norm of the gradients of a loss so small that its gradients are no float16 numbers."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, optimizer = sharded(1, "sgd", mesh)
    scale = LossScale(mesh, initial=initial)
    scale.scale(loss_of(model, 0, dist.get_rank(), 2) * 1e-7).backward()
    scale.unscale_(optimizer)
    return clip(optimizer, model, mesh, 1e9)


def test_what_a_loss_scale_is_for():
    model = build()
    (loss_of(model, 0) * 1e-7).backward()
    expected = float(nn.utils.clip_grad_norm_(model.parameters(), 1e9))
    scaled, unscaled = run_ranks(2, underflow, 2.0**20)[0], run_ranks(2, underflow, 1.0)[0]
    assert scaled == pytest.approx(expected, rel=1e-2)
    assert unscaled < 0.5 * expected


def one_rank_overflows(stage, name, culprit):
    """In step 2, one element of one gradient, which lies in the shard of rank `culprit`, is infinite."""
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, optimizer = sharded(stage, name, mesh)
    scale = LossScale(mesh, initial=256.0, interval=2)
    history, saw = [], []
    for step in range(5):
        scale.scale(loss_of(model, step, dist.get_rank(), 2)).backward()
        (optimizer if stage < 3 else sharding_of(model)).finish()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        held = [p for p in params if local_gradient(p).numel()]
        if step == 2 and dist.get_rank() == culprit:
            local_gradient(held[0])[1] = math.inf
        saw.append(all(bool(local_gradient(p).isfinite().all()) for p in held))
        before = [flat_of(p).clone() for p in held]
        with sharding_untouched(optimizer):
            scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        moved = any(not torch.equal(a, flat_of(b)) for a, b in zip(before, held, strict=True))
        history.append((moved, scale.value))
    return saw, history


class sharding_untouched:
    """Keeps `finish`, called again by `unscale_`, from overwriting what the test has put into the gradients."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    def __enter__(self):
        if hasattr(self.optimizer, "finish"):
            self.optimizer.finish = lambda: None

    def __exit__(self, *_):
        self.optimizer.__dict__.pop("finish", None)


@pytest.mark.parametrize(
    ("stage", "optimizer", "culprit"),
    [(1, "adamw", 0), (2, "fused-adamw", 1), (3, "sgd", 0), (3, "fused-adamw", 1)],
)
def test_all_ranks_skip_when_one_alone_overflows(stage, optimizer, culprit):
    results = run_ranks(2, one_rank_overflows, stage, optimizer, culprit)
    for rank, (saw, history) in enumerate(results):
        assert saw == [True, True, rank != culprit, True, True]
        assert history == [(True, 256.0), (True, 512.0), (False, 256.0), (True, 256.0), (True, 512.0)]


# -- other axes --------------------------------------------------------------------------------------------------


class Columns(nn.Module):
    """A linear layer of which every tp rank has half the columns, and a bias that all have."""

    def __init__(self, index):
        super().__init__()
        torch.manual_seed(1 + index)
        self.weight, self.bias = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.zeros(8))
        attach(self.weight, Layout((16, 8), (Step("tp", 2, index, Shard(0)),)))

    def forward(self, x):
        return (x @ self.weight.t() + self.bias).float().square().mean()


def beside_tensor_parallel(whole_mesh):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = Columns(mesh.get_local_rank("tp"))
    optimizer = shard_optimizer(OPTIMIZERS["sgd"](model.parameters()), mesh, model=model, precision=HALF)
    scale = LossScale(mesh if whole_mesh else mesh["dp_shard"], initial=64.0)
    skipped = []
    for step in range(3):
        x = torch.full((2, 8), 0.1 * (step + 1), dtype=torch.float16)
        if step == 1 and mesh.get_local_rank("tp") == 1:
            model.weight.register_hook(lambda g: g * math.inf)
        scale.scale(model(x)).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        skipped.append(scale.skipped)
    return skipped, scale.value


def test_tensor_parallel_ranks_agree():
    assert run_ranks(4, beside_tensor_parallel, True) == [([0, 1, 2], 16.0)] * 4


def missing_axis():
    with pytest.raises(MeshError, match="axes that the mesh") as caught:
        beside_tensor_parallel(False)
    assert "tp" in str(caught.value)
    mesh = dist.init_device_mesh("cpu", (4,), mesh_dim_names=("dp_shard",))
    model, optimizer = sharded(3, "sgd", mesh)
    loss_of(model, 0).backward()
    with pytest.raises(MeshError, match="axes that the mesh"):
        LossScale().step(optimizer)


def test_a_mesh_that_lacks_an_axis():
    run_ranks(4, missing_axis)


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "numbers",
    [
        {"initial": 0.0},
        {"initial": math.inf},
        {"growth": 1.0},
        {"backoff": 1.0},
        {"backoff": 0.0},
        {"interval": 0},
    ],
)
def test_numbers_that_do_not_work(numbers):
    with pytest.raises(PlanError, match="cannot work"):
        LossScale(**numbers)


def test_verbs_out_of_order():
    model = build()
    optimizer, scale = OPTIMIZERS["sgd"](model.parameters()), LossScale(initial=2.0)
    with pytest.raises(PlanError, match="before any step"):
        scale.update()
    scale.scale(loss_of(model, 0)).backward()
    scale.unscale_(optimizer)
    with pytest.raises(PlanError, match="already"):
        scale.unscale_(optimizer)
