"""Shards of a pipeline's stages, sharded by cai-zero and planned by cai-gemini, train as on one process."""

from __future__ import annotations

from functools import partial

import pytest
import twin
from shards import DISK, MIXED, adamw, planned
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import Tiers
from cai_mesh import BoxedTensor
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split
from cai_zero import shard_module, sharding_of


def train_pipeline(name: str, tiers: str | Tiers, disk: str, schedule: str, driver: str):
    mesh, microbatches = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard")), 4
    residency = planned(tiers, nvme=disk)
    model = shard_module(split(twin.build(name), mesh), mesh, driver=driver, residency=residency)
    optimizer = residency.optimizer(adamw(model.parameters()))
    runner = PipelineRunner(
        model,
        mesh,
        schedule=schedule,
        microbatches=microbatches,
        loss_fn=lambda output, ids: twin.loss_of(output.logits, ids) / microbatches,
        grad_sync=sharding_of(model),
        sharding=sharding_of(model),
    )
    backward, clip = twin.in_microbatches(runner, microbatches), partial(optimizer.clip_grad_norm_, twin.CLIP)
    losses, norms = twin.train(backward, clip, optimizer, mesh["dp_shard"])
    assert residency._engine.planned
    boxed = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, norms, twin.full(boxed)


@pytest.mark.parametrize(
    ("name", "residency", "schedule", "driver"),
    [
        ("llama", "auto", "1f1b", "actions"),
        ("gpt2", MIXED, "gpipe", "hooks"),
        ("gpt2", DISK, "1f1b", "hooks"),
    ],
    ids=str,
)
def test_beside_a_pipeline(name, residency, schedule, driver, tmp_path):
    """gpt2 ties its embeddings over the stages: they count once in the norm."""
    twin.assert_equals_one_process(
        name, run_ranks(4, train_pipeline, name, residency, str(tmp_path), schedule, driver)
    )
