"""Training with compressed communication: every stage equals a simulation of all ranks in one process."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from over_ranks import line
from torch import nn
from zero_models import Language

from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_zero import (
    Compression,
    Gather,
    LossScale,
    MixedPrecision,
    shard_module,
    shard_optimizer,
    sharding_of,
)

STEPS, WORLD, BLOCK = 6, 2, 128
INT8 = Compression(weights="int8", gradients="int8", block=BLOCK)


class Net(nn.Module):
    """One parameter of 8 blocks, so that the simulation knows the chunk: element i is element i of the parameter."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.weight = nn.Parameter(torch.randn(16, 64, generator=generator, dtype=torch.float64) / 8)

    def forward(self, x):
        return torch.tanh(x @ self.weight.t())


def loss_of(weight_or_model, step, rank):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x = torch.randn(4, 64, generator=generator, dtype=torch.float64)
    y = torch.randn(4, 16, generator=generator, dtype=torch.float64)
    if isinstance(weight_or_model, nn.Module):
        return (weight_or_model(x) - y).square().mean()
    return (torch.tanh(x @ weight_or_model.t()) - y).square().mean()


def rounded(x, form):
    """What is read back of a tensor, block for block, by arithmetic that shares nothing with the code under test."""
    out = []
    for block in x.flatten().split(BLOCK):
        largest = {"int8": 127, "fp8": 448}[form]
        step = (block.abs().max() / largest).float().double()
        if form == "int8":
            out.append((block / step).round() * step)
        else:
            value = (block / step).abs().clamp(min=1e-30)
            spacing = torch.exp2(value.log2().floor().clamp(min=-6.0) - 3)
            out.append((value / spacing).round() * spacing * block.sign() * step)
    return torch.cat(out).view_as(x)


def simulate(compression, steps=STEPS, world=WORLD):
    """Weights after every step, of one process that plays all ranks, with momentum as in torch."""
    weight = Net().weight.detach()
    momentum, errors, history = torch.zeros_like(weight), [torch.zeros_like(weight)] * world, []
    for step in range(steps):
        seen = rounded(weight, compression.weights) if compression.weights else weight
        total = torch.zeros_like(weight)
        for rank in range(world):
            leaf = seen.clone().requires_grad_()
            loss_of(leaf, step, rank).backward()
            gradient = leaf.grad + errors[rank]
            sent = rounded(gradient, compression.gradients) if compression.gradients else gradient
            if compression.error_feedback:
                errors[rank] = gradient - sent
            total += sent / world
        momentum = 0.9 * momentum + total
        weight = weight - 0.5 * momentum
        history.append(weight)
    return history


def start(stage, compression, precision=None, mesh=None):
    mesh = mesh or line()
    model = Net()
    if stage == 3:
        shard_module(model, mesh, compression=compression, precision=precision)
        return model, torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    inner = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    options = {"compression": compression, "precision": precision}
    if stage == "overlap":
        return model, shard_optimizer(inner, mesh, model=model, stage=2, overlap_gather=True, **options)
    if stage == "no model":
        return model, shard_optimizer(inner, mesh, **options)
    return model, shard_optimizer(inner, mesh, model=model, stage=stage, **options)


def weights_of(model, optimizer, stage):
    if stage == 3:
        return BoxedTensor.from_param(model.weight)
    return next(iter(optimizer.weights().values()))  # without a model it has no name


def go(model, optimizer, steps):
    for step in steps:
        loss_of(model, step, dist.get_rank()).backward()
        optimizer.step()
        optimizer.zero_grad()


def train(stage, compression, steps, shape=(2,)):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    model, optimizer = start(stage, compression, mesh=mesh)
    seen, history = [], []
    model.register_forward_pre_hook(lambda m, _: seen.append(m.weight.detach().clone()))
    for step in range(steps):
        go(model, optimizer, [step])
        history.append(weights_of(model, optimizer, stage).to_full(dist.group.WORLD))
    return seen, history


FORMS = [
    Compression(weights="int8", block=BLOCK),
    Compression(gradients="int8", block=BLOCK),
    Compression(gradients="int8", block=BLOCK, error_feedback=False),
    Compression(weights="fp8", gradients="fp8", block=BLOCK),
]


@pytest.mark.parametrize("stage", [1, 2, 3, "overlap", "no model"])
@pytest.mark.parametrize("compression", FORMS, ids=str)
def test_every_stage_is_the_simulation(stage, compression):
    expected = simulate(compression)
    plain = simulate(Compression())
    results = run_ranks(WORLD, train, stage, compression, STEPS)
    for seen, history in results:
        for a, b in zip(history, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        assert not torch.allclose(history[-1], plain[-1], rtol=1e-5, atol=0)
        for mine, theirs in zip(seen, results[0][0], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("stage", [2, 3])
def test_copies_of_shards_are_summed_in_full_precision(stage):
    expected = simulate(INT8, world=4)
    results = run_ranks(4, train, stage, INT8, STEPS, (2, 2))
    for seen, history in results:
        for a, b in zip(history, expected, strict=True):
            assert torch.allclose(a, b, rtol=1e-9, atol=1e-9)
        assert all(torch.equal(a, b) for a, b in zip(seen, results[0][0], strict=True))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_without_compression_nothing_is_rounded(stage):
    for seen, history in run_ranks(WORLD, train, stage, Compression(), STEPS):
        for a, b in zip(history, simulate(Compression()), strict=True):
            assert torch.allclose(a, b, rtol=1e-12, atol=1e-12)
        assert torch.equal(seen[0], Net().weight)


# -- models of many chunks ---------------------------------------------------------------------------------------


def train_language(stage, compression, compute, steps=30):
    """Losses over all ranks, and what every rank's forward has seen of one weight; two microbatches a step."""
    mesh = line()
    torch.manual_seed(4)
    model, precision = Language(13, 24, 3, bias=True), MixedPrecision(compute=compute)
    if stage == 3:
        shard_module(model, mesh, compression=compression, precision=precision)
        sync = sharding_of(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        options = {"stage": stage, "compression": compression, "precision": precision}
        sync = optimizer = shard_optimizer(inner, mesh, model=model, **options)
    seen, losses = [], []
    model.layers[1].register_forward_pre_hook(lambda m, _: seen.append(m.up.weight.detach().clone()))
    for step in range(steps):
        for micro in range(2):
            seed = 1000 * (step % 3) + 10 * micro + dist.get_rank()
            first = torch.randint(0, 13, (6, 1), generator=torch.Generator().manual_seed(seed))
            ids = (first + 5 * torch.arange(9)) % 13
            with sync.defer() if micro == 0 else contextlib.nullcontext():
                logits = model(ids[:, :-1]).flatten(0, 1).float()
                loss = nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / 2
                loss.backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    total = torch.stack(losses)
    dist.all_reduce(total)
    return seen, total / dist.get_world_size()


def check_language(stage, compression, compute, world):
    plain = run_ranks(world, train_language, stage, None, compute)[0][1]
    results = run_ranks(world, train_language, stage, compression, compute)
    for seen, losses in results:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(seen, results[0][0], strict=True))
        assert not torch.equal(losses, plain)
        assert torch.allclose(losses, plain, rtol=0.05, atol=0.02)
    assert plain[-1] < 0.7 * plain[0]


@pytest.mark.parametrize(("stage", "compute"), [(2, torch.bfloat16), (3, torch.float32)])
def test_a_model_of_many_chunks_trains_alike(stage, compute):
    check_language(stage, Compression(weights="int8", gradients="int8"), compute, 2)


@pytest.mark.matrix
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize(
    ("weights", "gradients"), [(w, g) for w in (None, "int8", "fp8") for g in (None, "int8", "fp8") if w or g]
)
@pytest.mark.parametrize(("stage", "compute"), [(1, torch.bfloat16), (2, torch.float32), (3, torch.bfloat16)])
def test_every_form_trains_alike(stage, compute, weights, gradients, world):
    check_language(stage, Compression(weights=weights, gradients=gradients), compute, world)


# -- residuals and checkpoints -----------------------------------------------------------------------------------


def resume(stage, half):
    """Weights after a run, and after one that was stopped half way and continued by fresh objects."""
    model, optimizer = start(stage, INT8)
    go(model, optimizer, range(half))
    saved = copy.deepcopy([model.state_dict(), optimizer.state_dict(), kept(model, optimizer, stage)])
    go(model, optimizer, range(half, STEPS))
    full = weights_of(model, optimizer, stage).to_full(dist.group.WORLD)
    model, optimizer = start(stage, INT8)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    if stage == 3:
        sharding_of(model).load_residuals(saved[2])
    go(model, optimizer, range(half, STEPS))
    return full, weights_of(model, optimizer, stage).to_full(dist.group.WORLD)


def kept(model, optimizer, stage):
    return sharding_of(model).residuals() if stage == 3 else None


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_resume_on_the_same_ranks_is_exact(stage):
    for full, continued in run_ranks(WORLD, resume, stage, 3):
        assert torch.equal(full, continued)


def reshard():
    model, optimizer = start(1, INT8)
    go(model, optimizer, range(2))
    before = optimizer.state_dict()["residual"]
    optimizer.restore_groups(optimizer.state_for_checkpoint()["param_groups"])
    return before[0].abs().max(), optimizer.state_dict()["residual"]


def test_a_checkpoint_that_reshards_starts_without_residuals():
    for before, after in run_ranks(WORLD, reshard):
        assert before > 0
        assert after == [None]


# -- beside float16 ----------------------------------------------------------------------------------------------


class HalfNet(Net):
    def forward(self, x):
        return super().forward(x.to(self.weight.dtype)).double()


def in_float16(stage):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model, precision = HalfNet(), MixedPrecision(compute=torch.float16)
    if stage == 3:
        shard_module(model, mesh, compression=INT8, precision=precision)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    else:
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = shard_optimizer(
            inner, mesh, model=model, stage=stage, compression=INT8, precision=precision
        )
    scale, losses = LossScale(mesh, initial=2.0**30), []
    for step in range(40):
        loss = loss_of(model, step % 2, dist.get_rank())
        scale.scale(loss).backward()
        scale.step(optimizer)
        scale.update()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return scale.skipped, scale.value, losses


@pytest.mark.parametrize("stage", [1, 3])
def test_overflow_is_seen_through_the_compression(stage):
    first, second = run_ranks(2, in_float16, stage)
    assert first[:2] == second[:2]
    assert 5 < first[0] < 25
    assert first[1] == 2.0 ** (30 - first[0])
    assert first[2][-1] < 0.6 * first[2][0]


# -- what is refused ---------------------------------------------------------------------------------------------


def refused():
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("dp_replicate",))
    with pytest.raises(PlanError, match="stage 0"):
        start(0, INT8, mesh=mesh)
    for stage in (1, 2, 3):
        with pytest.raises(PlanError, match="nothing that could be compressed"):
            start(stage, INT8, mesh=mesh)
    with pytest.raises(PlanError, match="copy engines"):
        shard_module(
            Net(), dist.init_device_mesh("cpu", (2,)), compression=INT8, gather=Gather(copy_engines=True)
        )
    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    with pytest.raises(PlanError, match="copy engines"):
        shard_optimizer(
            inner,
            dist.init_device_mesh("cpu", (2,)),
            model=model,
            compression=INT8,
            copy_engines=True,
        )


def test_where_weights_or_gradients_cannot_be_compressed():
    run_ranks(2, refused)
