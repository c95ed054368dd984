"""Gradients clipped sample by sample in every stage, beside a plain loop over samples in one process."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_models import Language

from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.testing import run_ranks
from cai_zero import MixedPrecision, SampleClip, shard_module, shard_optimizer, sharding_of

SAMPLES, STEPS, MOST = 4, 3, 0.8


def build() -> Language:
    torch.manual_seed(5)
    return Language(12, 16, 2, norm=False).double()


def loss_of(model, step, sample):
    """Samples differ much in the size of their gradients."""
    draws = torch.Generator().manual_seed(100 * step + sample)
    ids = torch.randint(0, 12, (1, 7), generator=draws)
    return (
        3.0**sample / 9 * nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
    )


def plainly():
    """Parameters after the steps, and how many samples were clipped."""
    model, clipped = build(), 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    params = list(model.parameters())
    for step in range(STEPS):
        sums = [torch.zeros_like(p) for p in params]
        for sample in range(SAMPLES):
            gradients = torch.autograd.grad(loss_of(model, step, sample), params)
            norm = torch.stack([g.norm() for g in gradients]).norm()
            clipped += int(norm > MOST)
            for total, gradient in zip(sums, gradients, strict=True):
                total += (
                    gradient * min(1.0, MOST / float(norm)) / 2
                )  # gradients are averaged over two data ranks
        for param, total in zip(params, sums, strict=True):
            param.grad = total
        optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, clipped


def on_ranks(stage: int, deferred: bool):
    model, mesh = build(), init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
    precision = MixedPrecision(compute=torch.float64)
    if stage == 3:
        shard_module(model, mesh, precision=precision)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        clip = SampleClip(sharding_of(model))
    else:
        optimizer = shard_optimizer(
            torch.optim.AdamW(model.parameters(), lr=1e-2),
            mesh,
            model=model,
            stage=stage,
            precision=precision,
        )
        clip = SampleClip(optimizer)
    own = range(dist.get_rank() * 2, dist.get_rank() * 2 + 2)
    for step in range(STEPS):
        with clip.step(MOST):
            with clip.defer():
                loss_of(model, step, own[0]).backward()
            if deferred:
                with clip.defer():
                    loss_of(model, step, own[1]).backward()
            else:
                loss_of(model, step, own[1]).backward()
            clip.finish()
        optimizer.step()
        optimizer.zero_grad()
    if stage == 3:
        boxed = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
        return {name: each.to_full(dist.group.WORLD) for name, each in sorted(boxed.items())}
    optimizer.wait_gathered()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("stage", "deferred"), [(0, False), (1, True), (2, False), (3, True), (3, False)])
def test_is_a_plain_loop_over_samples(stage, deferred):
    expected, clipped = plainly()
    assert 0 < clipped < SAMPLES * STEPS
    for found in run_ranks(2, on_ranks, stage, deferred):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11, msg=name)


def with_parts():
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_shard", "tp"))
    model = build()
    optimizer = shard_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), mesh, model=model, stage=1)
    with pytest.raises(PlanError, match="a mesh with tp"):
        SampleClip(optimizer)


def test_parts_of_gradients_are_refused():
    run_ranks(2, with_parts)
