"""Offload on a GPU: the same training, within the memory it is given."""

from __future__ import annotations

import gc
import threading
import time

import pytest
import torch
from torch import nn

from cai_gemini import Tiers, offload
from cai_gemini.memory import pinned
from cai_gemini.memory.pinned import host_memory
from cai_gemini.planning.budget import usable

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WIDTH, BLOCKS, STEPS = 1024, 12, 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, WIDTH)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
            for _ in range(BLOCKS)
        )

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = x + layer(x)
        return x


@pytest.fixture(autouse=True)
def nothing_else_on_the_device():
    """What an earlier test has left would count against the memory that this one gives.

    Its last steps may still run in the background, and hold the model while they do.
    """
    end = time.monotonic() + 120
    while gc.collect() + sum(t.name.startswith("cai_gemini") for t in threading.enumerate()) > 0:
        assert time.monotonic() < end, "a model of an earlier test still lives"
        time.sleep(0.02)
    torch.cuda.empty_cache()


def build():
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def train(model, optimizer, clip):
    losses = []
    for step in range(STEPS):
        x = torch.randn(256, 64, generator=torch.Generator().manual_seed(step)).cuda()
        loss = (model(x) - x.repeat(1, WIDTH // 64)).square().mean()
        loss.backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def plain():
    model, optimizer = build()
    model = model.cuda()
    return train(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))


@pytest.mark.parametrize(
    "residency",
    [
        "host",
        "device",
        "auto",
        Tiers(1.0, 0.4),
        Tiers(0.5, 0.2, 0.3),
        Tiers(0.5, 0.2, streamed=0.5),
        Tiers(streamed=1.0),
    ],
    ids=str,
)
def test_training_is_that_without_offload(residency, tmp_path):
    expected = plain()
    gc.collect()
    model, optimizer = build()
    options = {"nvme": tmp_path} if isinstance(residency, Tiers) and residency.disk else {}
    model, optimizer = offload(
        model, optimizer, residency=residency, device="cuda", device_memory="3GB", **options
    )
    got = train(model, optimizer, lambda: optimizer.clip_grad_norm_(1.0))
    assert got == pytest.approx(expected, rel=1e-4)


def test_the_budget_holds():
    """State of 1.6 GB beside weights and gradients; a third of that is given."""
    model, optimizer = build()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    budget = 660 * 10**6
    model, optimizer = offload(model, optimizer, device="cuda", device_memory=budget, compute=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(STEPS):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= usable(budget, torch.device("cuda"))
    assert optimizer._engine.plan.state, "memory that is there is used"


def small_step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("residency", ["host", Tiers(1.0, 0.4)], ids=str)
def test_a_step_makes_nobody_wait_for_the_device(residency):
    model, optimizer = build()
    model, optimizer = offload(model, optimizer, residency=residency, device="cuda")
    x = torch.randn(256, 64, device="cuda")
    for step in range(STEPS):
        if step == 4:
            optimizer.wait()
            torch.cuda.set_sync_debug_mode("error")
        try:
            small_step(model, optimizer, x)
        finally:
            if step == STEPS - 1:
                optimizer.wait()
                torch.cuda.set_sync_debug_mode("default")


def sgd_step(model, optimizer, x, clip):
    (1e4 * model(x).square().mean()).backward()
    clip()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("residency", ["host", "device"])
def test_training_on_a_stream_that_is_not_the_default(residency):
    """The norm is clipped to 1 by a factor that differs from step to step: one that is read too early shows."""
    xs = [torch.randn(256, 64, device="cuda") for _ in range(STEPS)]
    model = build()[0].cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for x in xs:
        sgd_step(model, optimizer, x, lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    twin = [p.detach().cpu() for p in model.parameters()]
    work = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        model = build()[0]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        model, optimizer = offload(model, optimizer, residency=residency, device="cuda")
        for x in xs:
            work = work @ work / 4096
            sgd_step(model, optimizer, x, lambda: optimizer.clip_grad_norm_(1.0))
        optimizer.wait()
    torch.cuda.synchronize()
    for ours, theirs in zip(model.parameters(), twin, strict=True):
        torch.testing.assert_close(ours.detach().cpu().view(theirs.shape), theirs, rtol=1e-4, atol=1e-5)


def test_the_budget_holds_with_several_backwards_a_step():
    """Their gradients are summed in float32, on the device where the state is."""
    model, optimizer = build()
    torch.cuda.empty_cache()
    before, budget = torch.cuda.memory_allocated(), 990 * 10**6
    model, optimizer = offload(model, optimizer, device="cuda", device_memory=budget, compute=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(STEPS):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(3):
            model(x).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    peak = torch.cuda.memory_stats()["active_bytes.all.peak"]
    assert peak - before <= usable(budget, torch.device("cuda"))
    assert optimizer._engine.plan.state and optimizer._engine.chunks[0].sizes.sums


def test_host_memory_is_registered_and_a_refusal_is_forgotten():
    held = [host_memory(2**20 + i, torch.float32, torch.device("cuda", 0)) for i in range(8)]
    assert all(t.is_pinned() for t in held)
    runtime = torch.cuda.cudart()
    assert int(runtime.cudaHostRegister(held[0].data_ptr(), 4096, 0)) != 0, "registered before"
    pinned._forget_error(torch.device("cuda", 0))
    assert torch.ones(3, device="cuda").sum().item() == 3


def test_a_model_may_go_while_its_weights_come():
    """What is allocated next is not written by copies of a model that is gone."""
    for _ in range(5):
        model, optimizer = build()
        model, optimizer = offload(model, optimizer, residency=Tiers(1.0, 0.0), device="cuda")
        x = torch.randn(256, 64, device="cuda")
        for _ in range(3):
            small_step(model, optimizer, x)
        optimizer.wait()
        del model, optimizer
        other = [torch.full((8 * 2**20,), 7.0, device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        assert all(bool((t == 7.0).all()) for t in other)
