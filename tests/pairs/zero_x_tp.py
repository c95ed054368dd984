"""cai-zero over cai-tensor-parallel in a plain loop equals one process: losses, norms, final parameters."""

from __future__ import annotations

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.testing import assert_names_kept, run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import shard_module, shard_optimizer


def train(name: str, stage: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = twin.build(name)
    names = [n for n, _ in model.named_parameters()]
    parallelize(model, mesh, logits="sharded")
    if stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage)
    assert_names_kept(names, [n for n, _ in model.named_parameters()])

    def backward(ids):
        loss = twin.own_loss(model, ids)
        loss.backward()
        return loss

    def clip():
        if stage == 3:
            return clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
        return optimizer.clip_grad_norm_(twin.CLIP)

    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, stage: int):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, stage))
