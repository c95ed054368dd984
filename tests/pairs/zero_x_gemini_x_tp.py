"""Shards of a tensor-parallel model, sharded by cai-zero and planned by cai-gemini, train as on one process."""

from __future__ import annotations

import pytest
import twin
from shards import DISK, MIXED, adamw, assert_equals_one_process, planned
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import Tiers
from cai_mesh import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import shard_module


def train_tensor_parallel(name: str, tiers: str | Tiers, disk: str):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    data, residency = mesh["dp_shard"], planned(tiers, nvme=disk)
    model = shard_module(parallelize(twin.build(name), mesh), mesh, residency=residency)
    optimizer = residency.optimizer(adamw(model.parameters()))
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids = twin.batch(step, data.get_local_rank(), 2)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norms.append(float(optimizer.clip_grad_norm_(twin.CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(data.get_group(), loss))
    assert residency._engine.planned
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("name", "residency"), [("llama", MIXED), ("gpt2", "auto"), ("llama", DISK)], ids=str
)
def test_beside_tensor_parallelism(name, residency, tmp_path):
    assert_equals_one_process(name, run_ranks(4, train_tensor_parallel, name, residency, str(tmp_path)))
