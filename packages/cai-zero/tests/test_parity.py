"""Every stage equals one process, step by step: losses, reduced gradients, norms and final parameters."""

from __future__ import annotations

import contextlib
import math

import pytest
import torch
import torch.distributed as dist
from over_ranks import full_values
from torch import nn
from zero_models import Block

from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_zero import MixedPrecision, shard_module, shard_optimizer, sharding_of

STEPS, MICRO = 4, 2


class Net(nn.Module):
    """Three blocks, one of them used twice, a tied head, a frozen scale and a branch no step uses."""

    def __init__(self, width: int = 7, vocab: int = 11):
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(3))
        self.unused = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.ones(width), requires_grad=False)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        x = self.embed(ids)
        for i in (0, 1, 2, 1):
            x = self.layers[i](x)
        return self.head(x * self.scale)


def build(dtype):
    torch.manual_seed(3)
    return Net().to(dtype)


def data(step, micro, rank, world):
    """This rank's part of a microbatch of 12 sequences."""
    ids = torch.randint(0, 11, (12, 6), generator=torch.Generator().manual_seed(100 * step + micro))
    return ids[rank * (12 // world) : (rank + 1) * (12 // world)]


def loss_of(model, ids):
    logits = model(ids[:, :-1]).flatten(0, 1).double()
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten()) / MICRO


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-1, momentum=0.9),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3),
}


def reference(dtype, optimizer):
    model = build(dtype)
    opt = OPTIMIZERS[optimizer](model.parameters())
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO):
            loss = loss_of(model, data(step, micro, 0, 1))
            loss.backward()
            total += float(loss)
        if step == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5)))
        opt.step()
        opt.zero_grad()
        losses.append(total)
    return losses, norms, first, {n: p.detach().clone() for n, p in model.named_parameters()}


def sharded(stage, dtype, optimizer, shape):
    mesh = dist.init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[-len(shape) :])
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(dtype)
    names = [n for n, _ in model.named_parameters()]
    if stage == 3:
        sync = sharding_of(shard_module(model, mesh))
        opt = OPTIMIZERS[optimizer](model.parameters())
    else:
        opt = sync = shard_optimizer(
            OPTIMIZERS[optimizer](model.parameters()), mesh, model=model, stage=stage
        )
    assert_names_kept(names, [n for n, _ in model.named_parameters()])
    losses, norms, first = [], [], {}
    for step in range(STEPS):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(MICRO):
            with sync.defer() if micro + 1 < MICRO else contextlib.nullcontext():
                loss = loss_of(model, data(step, micro, rank, world))
                loss.backward()
            total += loss.detach()
        sync.finish()
        if step == 0:
            first = full_values(opt.gradients() if stage < 3 else module_gradients(model))
        norms.append(
            float(opt.clip_grad_norm_(0.5) if stage < 3 else clip_grad_norm_(model.parameters(), 0.5, mesh))
        )
        opt.step()
        opt.zero_grad()
        dist.all_reduce(total)
        losses.append(float(total) / world)
    return (
        losses,
        norms,
        first,
        full_values({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}),
    )


def module_gradients(model):
    return {n: BoxedTensor.like(p, p.grad) for n, p in model.named_parameters() if p.grad is not None}


CASES = [
    (0, torch.float64, "adamw", (2,)),
    (1, torch.float64, "adamw", (2,)),
    (2, torch.float64, "sgd", (2,)),
    (3, torch.float64, "adamw", (2,)),
    (1, torch.float32, "rmsprop", (3,)),
    (3, torch.float32, "sgd", (3,)),
    (2, torch.float64, "adamw", (2, 2)),
    (3, torch.float64, "rmsprop", (2, 2)),
]


@pytest.mark.parametrize(("stage", "dtype", "optimizer", "shape"), CASES)
def test_equals_one_process(stage, dtype, optimizer, shape):
    tolerance = 1e-9 if dtype == torch.float64 else 1e-4
    losses, norms, first, final = reference(dtype, optimizer)
    for got in run_ranks(math.prod(shape), sharded, stage, dtype, optimizer, shape):
        assert torch.allclose(torch.tensor(got[0]), torch.tensor(losses), rtol=tolerance, atol=0)
        assert torch.allclose(torch.tensor(got[1]), torch.tensor(norms), rtol=tolerance, atol=0)
        expected = {n: first.get(n, torch.zeros_like(final[n])) for n in got[2]}
        assert_same_as_one_device(got[2], expected, tolerance=tolerance)
        assert_same_as_one_device(got[3], final, tolerance=tolerance)


def mixed(stage):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("shard",))
    model = build(torch.float32)
    precision = MixedPrecision(compute=torch.bfloat16)
    if stage == 3:
        shard_module(model, mesh, precision=precision)
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt = shard_optimizer(inner, mesh, model=model, stage=stage, precision=precision)
    seen = []
    model.layers[0].register_forward_pre_hook(lambda m, a: seen.append(m.up.weight.dtype))
    losses = []
    for step in range(30):
        loss = loss_of(model, data(step % 3, 0, dist.get_rank(), 2))
        loss.backward()
        opt.step()
        opt.zero_grad()
        losses.append(float(loss.detach()))
    state = next(state for p, state in opt.state.items() if p.numel())
    return seen[0], state["exp_avg"].dtype, losses


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bfloat16_compute_keeps_float32_masters(stage):
    for compute, moments, losses in run_ranks(2, mixed, stage):
        assert (compute, moments) == (torch.bfloat16, torch.float32)
        assert losses[-1] < 0.9 * losses[0]
