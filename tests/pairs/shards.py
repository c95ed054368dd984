"""Residencies of a small model's shards, and what training on them is held to."""

from __future__ import annotations

import pytest
import torch
import twin

from cai_gemini import ChunkResidency, Tiers, Tuning
from cai_gemini.simulate import Rates
from cai_mesh.testing import assert_same_as_one_device

SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)
ROOMY, MIXED, DISK = 10**7, Tiers(0.6, 0.3), Tiers(0.5, 0.2, disk=0.6, disk_weights=0.3)
STREAMED = Tiers(0.5, 0.2, streamed=0.6)


def planned(
    residency: str | Tiers = MIXED, memory: int = ROOMY, nvme: str | None = None, **options
) -> ChunkResidency:
    tuning = Tuning(rates=SLOW_HOST, **options)
    return ChunkResidency(residency, device_memory=memory, nvme=nvme, tuning=tuning)


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def assert_equals_one_process(name: str, results, device: str = "cpu") -> None:
    losses, norms, final = twin.reference(name, device)
    for got in results:
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
