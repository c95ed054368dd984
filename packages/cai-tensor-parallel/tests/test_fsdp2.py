"""torch's `fully_shard` over `parallelize` equals one process: losses, norms, gradients, parameters, checkpoints."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from small_models import build, full, in_float64
from torch import nn
from torch.distributed.fsdp import fully_shard

from cai_mesh import BoxedTensor, checkpoint, clip_grad_norm_
from cai_mesh.errors import MeshError
from cai_mesh.layout import record_of
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize

STEPS, CLIP = 3, 0.3


def batch(step):
    return torch.randint(0, 100, (4, 9), generator=torch.Generator().manual_seed(step))


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids, use_cache=False).loss


def one():
    model = build("llama", vocab_size=100)
    model.loss_function = in_float64
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, norms, grads = [], [], None
    for step in range(STEPS):
        loss = loss_of(model, batch(step))
        loss.backward()
        grads = grads or {n: p.grad.clone() for n, p in model.named_parameters()}
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms, grads, {n: p.detach() for n, p in model.named_parameters()}


def train(folder):
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = parallelize(build("llama", vocab_size=100), mesh, logits="sharded")
    for block in model.model.layers:
        fully_shard(block, mesh=mesh["dp_shard"])
    fully_shard(model, mesh=mesh["dp_shard"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    rank = mesh["dp_shard"].get_local_rank()
    losses, norms, grads = [], [], None
    for step in range(STEPS):
        loss = loss_of(model, batch(step)[2 * rank : 2 * rank + 2])
        loss.backward()
        if grads is None:
            refused_or_right(model, mesh)
            boxes = BoxedTensor.of_model(model)
            grads = full(
                {n: BoxedTensor.like(p, p.grad.clone()) for n, p in model.named_parameters()},
                dist.group.WORLD,
            )
            assert boxes.keys() == grads.keys()
        norms.append(float(clip_grad_norm_(model, CLIP, mesh)))
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["dp_shard"].get_group())
        losses.append(float(mean) / 2)
    checkpoint.save(folder, BoxedTensor.of_model(model), step=1)
    return losses, norms, grads, full(BoxedTensor.of_model(model), dist.group.WORLD)


def refused_or_right(model, mesh):
    """From tensors alone the norm is refused as long as nobody has looked at the model."""
    for p in model.parameters():
        p.__dict__.pop("cai_record", None)
    with pytest.raises(MeshError, match="pass the model in place of its parameters"):
        clip_grad_norm_(model.parameters(), CLIP, mesh)
    assert record_of(model.lm_head.weight).layout is None


def test_equals_one_process(tmp_path):
    losses, norms, grads, final = one()
    for got in run_ranks(4, train, str(tmp_path)):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], grads, tolerance=1e-8)
        assert_same_as_one_device(got[3], final, tolerance=1e-8)
    model = build("llama", vocab_size=100)
    checkpoint.load(tmp_path, BoxedTensor.of_model(model))
    assert_same_as_one_device({n: p.detach() for n, p in model.named_parameters()}, final, tolerance=1e-8)
