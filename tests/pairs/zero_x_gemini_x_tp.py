"""Shards of a tensor-parallel model, sharded by cai-zero and planned by cai-gemini, train as on one process."""

from __future__ import annotations

from functools import partial

import pytest
import twin
from shards import DISK, MIXED, adamw, planned
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import Tiers
from cai_mesh import BoxedTensor
from cai_mesh.testing import run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import shard_module


def train_tensor_parallel(name: str, tiers: str | Tiers, disk: str):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    residency = planned(tiers, nvme=disk)
    model = shard_module(parallelize(twin.build(name), mesh, logits="sharded"), mesh, residency=residency)
    optimizer = residency.optimizer(adamw(model.parameters()))

    def backward(ids):
        loss = twin.own_loss(model, ids)
        loss.backward()
        return loss

    clip = partial(optimizer.clip_grad_norm_, twin.CLIP)
    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    assert residency._engine.planned
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize(
    ("name", "residency"), [("llama", MIXED), ("gpt2", "auto"), ("llama", DISK)], ids=str
)
def test_beside_tensor_parallelism(name, residency, tmp_path):
    twin.assert_equals_one_process(name, run_ranks(4, train_tensor_parallel, name, residency, str(tmp_path)))
