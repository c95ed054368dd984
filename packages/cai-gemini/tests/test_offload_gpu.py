"""Offload on a GPU: the same training, within the memory it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from cai_gemini import Tiers, offload

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
    "residency", ["host", "device", "auto", Tiers(1.0, 0.4), Tiers(0.5, 0.2, 0.3)], ids=str
)
def test_training_is_that_without_offload(residency, tmp_path):
    expected = plain()
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
    budget = 600 * 10**6
    model, optimizer = offload(model, optimizer, device="cuda", device_memory=budget, compute=torch.bfloat16)
    x = torch.randn(256, 64, device="cuda", dtype=torch.bfloat16)
    for step in range(STEPS):
        if step == 3:
            torch.cuda.reset_peak_memory_stats()
        model(x).float().square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= budget
    assert optimizer._engine.plan.state, "memory that is there is used"
