"""Loops that are not ours: schedulers, state_dict, uneven use of blocks, partial training, memory."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
import torch.distributed as dist
from over_ranks import full_parameters, line
from torch import nn

from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, shard_module, shard_optimizer, sharding_of
from cai_zero.replicated import chunks


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(6, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, skip=()):
        x = self.inp(x)
        for i, layer in enumerate(self.layers):
            if i not in skip:
                x = x + torch.tanh(layer(x))
        return x.square().mean()


def build():
    torch.manual_seed(0)
    return Net().double()


def x_of(step, rank):
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def one_process(world, skips=None, steps=3):
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        opt.zero_grad()
        for rank in range(world):
            (model(x_of(step, rank), (skips or {}).get(rank, ())) / world).backward()
        opt.step()
    return {n: p.detach() for n, p in model.named_parameters()}


def close(got, expected):
    for name, value in expected.items():
        torch.testing.assert_close(got[name], value, rtol=1e-9, atol=1e-11)


SKIPS = {0: (), 1: (2,)}


def uneven(stage):
    chunks.BUCKET_ELEMENTS = 1
    try:
        model = build()
        opt = shard_optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), line(), model=model, stage=stage
        )
        for step in range(3):
            model(x_of(step, dist.get_rank()), SKIPS[dist.get_rank()]).backward()
            opt.step()
            opt.zero_grad()
        return full_parameters(model)
    finally:
        chunks.BUCKET_ELEMENTS = 32 * 1024 * 1024


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_block_only_some_ranks_use(stage):
    for got in run_ranks(2, uneven, stage, timeout=60):
        close(got, one_process(2, SKIPS))


def plain_loop():
    model = build()
    opt = shard_optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), line())
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=1.0)
    for step in range(3):
        opt.zero_grad()
        model(x_of(step, dist.get_rank())).backward()
        opt.step()
        schedule.step()
    trained = {n: p.detach().clone() for n, p in model.named_parameters()}
    halved = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
    opt.step()
    halved.step()
    return trained, opt.param_groups[0]["lr"]


def test_without_a_model_and_with_a_scheduler():
    expected = one_process(2)
    for got, rate in run_ranks(2, plain_loop):
        assert rate == pytest.approx(5e-3)
        close(got, expected)


def resumed():
    precision = MixedPrecision(compute=torch.bfloat16)
    held = []
    for again in (False, True):
        model = build().float()
        opt = shard_optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2), line(), model=model, precision=precision
        )
        if again:
            opt.load_state_dict(held[0][0])
        for step in range(2 if again else 0, 4):
            if step == 2 and not again:
                held.append((copy.deepcopy(opt.state_dict()), None))
            model(x_of(step, dist.get_rank()).bfloat16()).backward()
            opt.step()
            opt.zero_grad()
        held.append((None, {n: b.to_full() for n, b in opt.weights().items()}))
    return held[1][1], held[2][1]


def test_state_dict_holds_the_masters():
    for straight, again in run_ranks(2, resumed):
        assert all(torch.equal(straight[n].nan_to_num(), again[n].nan_to_num()) for n in straight)


def memory():
    model = build()
    total = sum(p.numel() for p in model.parameters())
    first = list(model.parameters())
    shard_module(model, line())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    sharding = sharding_of(model)
    parts = [part for unit in sharding._units.values() for part in unit.parts]
    seen = []

    def record(module, args):
        seen.append(sum(p.unit.unsharded.untyped_storage().nbytes() > 0 for p in parts))

    for layer in model.layers:
        layer.register_forward_pre_hook(record)
    with torch.no_grad():
        for step in range(2):
            model(x_of(step, 0))
    model(x_of(0, 0)).backward()
    opt.step()
    sharding.reshard(model)  # what the step has begun to gather for the next forward
    assert max(seen) <= 3, "more than the model's own, the block in use and the next are unsharded"
    for part in parts:
        assert part.unit.unsharded.untyped_storage().nbytes() == 0
        assert not part.reducible.buffer.is_open
    assert sum(p.untyped_storage().nbytes() for p in first) == 0
    held = sum(part.unit.shard.numel() for part in parts)
    padding = sum(part.unit.chunk.numel for part in parts) - total
    assert held * dist.get_world_size() == total + padding
    opt.zero_grad()
    # a forward without a backward leaves the root unsharded; the step after must not be missed
    model(x_of(0, 0)).backward()
    model(x_of(0, 0))
    opt.step()
    stale = float(model(x_of(0, 0)).detach())
    with torch.no_grad():
        sharding.reshard(model)
        return stale, float(model(x_of(0, 0)))


def test_stage_3_frees_what_it_gathers_and_sees_every_step():
    for stale, fresh in run_ranks(2, memory):
        assert stale == fresh


def accumulated(stage, defer):
    model = build()
    if stage == 3:
        sync = sharding_of(shard_module(model, line()))
        opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        opt = sync = shard_optimizer(inner, line(), model=model, stage=stage)
    for step in range(3):
        for part in x_of(step, dist.get_rank()).chunk(2):
            with sync.defer() if defer else contextlib.nullcontext():
                (model(part) / 2).backward()
        opt.step()
        opt.zero_grad()
    return full_parameters(model)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_accumulation_with_and_without_defer(stage):
    for defer in (True, False):
        for got in run_ranks(2, accumulated, stage, defer):
            close(got, one_process(2))
