"""Models that run kernels (`swap`) train under every ZeRO stage as they do on one process, and as plain ones do."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_kernels import swap
from cai_kernels.swap.logits import Logits
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import shard_module, shard_optimizer


def step_through(model, optimizer, clip, ids_of):
    losses, norms, formed = [], [], []
    for step in range(twin.STEPS):
        ids = ids_of(step)
        logits = model(input_ids=ids, use_cache=False).logits
        loss = twin.loss_of(logits, ids)
        loss.backward()
        formed.append(not isinstance(logits, Logits) or logits.formed is not None)
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses, norms, formed


def build(name: str):
    model = twin.build(name).train()
    return model, sorted({r.kind for r in swap(model).replaced})


def alone(name: str):
    """The swapped model in a plain loop."""
    model, _ = build(name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, _ = step_through(
        model, optimizer, lambda: torch.nn.utils.clip_grad_norm_(model.parameters(), twin.CLIP), twin.batch
    )
    return [float(x) for x in losses], norms, {n: p.detach().clone() for n, p in model.named_parameters()}


def train(name: str, ranks: int, stage: int):
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp_shard",))
    model, replaced = build(name)
    if stage == 3:
        model = shard_module(model, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        clip = partial(clip_grad_norm_, list(model.parameters()), twin.CLIP, mesh)
    else:
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = shard_optimizer(inner, mesh, model=model, stage=stage)
        clip = partial(optimizer.clip_grad_norm_, twin.CLIP)
    losses, norms, formed = step_through(
        model, optimizer, clip, lambda step: twin.batch(step, mesh.get_local_rank(), mesh.size())
    )
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return [twin.mean_over(mesh.get_group(), x) for x in losses], norms, twin.whole(boxed), replaced, formed


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, stage: int):
    losses, norms, final = alone(name)
    plain, _, _ = twin.reference(name)
    assert losses == pytest.approx(plain, rel=1e-6)  # LLaMA's own norm multiplies in float32
    for got in run_ranks(2, train, name, 2, stage):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
        assert got[3] == (["loss", "norm"] if name == "gpt2" else ["activation", "loss", "norm", "rope"])
        assert got[4] == [False] * twin.STEPS, "logits were formed"
