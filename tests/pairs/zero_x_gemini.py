"""Rows that cai-zero shards (stage 3) and cai-gemini keeps in host memory train as on one process."""

from __future__ import annotations

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import HostResidency, offload_activations
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_zero import shard_module


class Counting(HostResidency):
    """The host residency, which also counts what it is asked for."""

    def __init__(self):
        super().__init__()
        self.placed, self.fetched, self.released = 0, 0, 0

    def place(self, tensor):
        self.placed += 1
        return super().place(tensor)

    def fetch(self, stored):
        self.fetched += 1
        return super().fetch(stored)

    def release(self, stored):
        self.released += 1
        super().release(stored)


def train(name: str, shape: tuple[int, ...], activations: bool = False):
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    data, residency = mesh._flatten("data"), Counting()
    model = shard_module(twin.build(name), mesh, residency=residency)
    away = offload_activations(model, keep=0, smallest=0) if activations else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids = twin.batch(step, data.get_local_rank(), data.size())
        loss = twin.loss_of(model(input_ids=ids, use_cache=False).logits, ids)
        loss.backward()
        norms.append(float(clip_grad_norm_(model.parameters(), twin.CLIP, mesh)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(data.get_group(), loss))
    assert away is None or away.host_bytes > 0
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, norms, twin.whole(boxed), (residency.placed, residency.fetched, residency.released)


@pytest.mark.parametrize("shape", [(1, 2), (2, 2)])
@pytest.mark.parametrize("name", list(twin.MODELS))
@pytest.mark.parametrize("activations", [False, True])
def test_equals_one_process(name: str, shape: tuple[int, ...], activations: bool):
    losses, norms, final = twin.reference(name)
    for got in run_ranks(shape[0] * shape[1], train, name, shape, activations):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
        placed, fetched, released = got[3]
        assert placed > 0
        assert fetched >= released > 2 * twin.STEPS
