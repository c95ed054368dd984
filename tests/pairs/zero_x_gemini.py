"""Rows that cai-zero shards (stage 3) and cai-gemini keeps in device and host memory train as on one process."""

from __future__ import annotations

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import ChunkResidency, Tiers, Tuning, offload_activations
from cai_gemini.simulate import Rates
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import shard_module

SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)
ROOMY = 10**7


def planned(residency: str | Tiers, budget: int = ROOMY) -> ChunkResidency:
    return ChunkResidency(residency, device_memory=budget, tuning=Tuning(rates=SLOW_HOST))


def train(
    name: str, shape: tuple[int, ...], residency: str | Tiers, own_clip: bool, activations: bool = False
):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    data, rows = mesh._flatten("data"), planned(residency)
    model = shard_module(twin.build(name), mesh, residency=rows)
    away = offload_activations(model, keep=0, smallest=0) if activations else None
    optimizer = rows.optimizer(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True))
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids = twin.batch(step, data.get_local_rank(), data.size())
        for part in ids.chunk(2):
            loss = twin.loss_of(model(input_ids=part, use_cache=False).logits, part) / 2
            loss.backward()
            losses.append(twin.mean_over(data.get_group(), loss))
        clip = (
            optimizer.clip_grad_norm_(twin.CLIP)
            if own_clip
            else clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
        )
        norms.append(float(clip))
        optimizer.step()
        optimizer.zero_grad()
    losses = [a + b for a, b in zip(losses[::2], losses[1::2], strict=True)]
    assert away is None or away.host_bytes > 0
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, norms, twin.whole(boxed), optimizer._engine.plan


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", list(twin.MODELS))
@pytest.mark.parametrize("residency", ["auto", "host", "device", Tiers(0.6, 0.3)], ids=str)
def test_equals_one_process(name: str, shape: tuple[int, ...], residency):
    losses, norms, final = twin.reference(name)
    for got in run_ranks(shape[0] * shape[1], train, name, shape, residency, True):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
