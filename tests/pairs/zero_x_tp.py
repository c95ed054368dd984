"""cai-zero over cai-tensor-parallel in a plain loop equals one process: losses, norms, final parameters."""

from __future__ import annotations

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.testing import assert_names_kept, assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize
from cai_zero import shard_module, shard_optimizer


def train(name: str, stage: int):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    data = mesh["dp_shard"]
    model = twin.build(name)
    names = [n for n, _ in model.named_parameters()]
    parallelize(model, mesh)
    if stage == 3:
        shard_module(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if stage < 3:
        optimizer = shard_optimizer(optimizer, mesh, model=model, stage=stage)
    assert_names_kept(names, [n for n, _ in model.named_parameters()])
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids = twin.batch(step, data.get_local_rank(), 2)
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        norm = (
            clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
            if stage == 3
            else optimizer.clip_grad_norm_(twin.CLIP)
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(data.get_group(), loss))
        norms.append(float(norm))
    return losses, norms, twin.full({n: BoxedTensor.from_param(p) for n, p in model.named_parameters()})


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("name", list(twin.MODELS))
def test_equals_one_process(name: str, stage: int):
    losses, norms, final = twin.reference(name)
    for got in run_ranks(4, train, name, stage):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
