"""cai-zero as the gradient sync of a pipeline equals one process; gpt2 ties its embeddings over the stages."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import twin
from torch.distributed.device_mesh import init_device_mesh

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.layout import canonical_name
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_pipeline import PipelineRunner, split
from cai_zero import shard_module, shard_optimizer, sharding_of

MICROBATCHES = 4


def train(name: str, stage: int, schedule: str, driver: Literal["hooks", "actions"] = "hooks"):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    data = mesh["dp_shard"]
    model = split(twin.build(name), mesh)
    if stage == 3:
        sync = sharding_of(shard_module(model, mesh, driver=driver))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = sync = shard_optimizer(plain, mesh, model=model, stage=stage)
    runner = PipelineRunner(
        model,
        mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=lambda output, ids: twin.loss_of(output.logits, ids) / MICROBATCHES,
        grad_sync=sync,
        sharding=sync if stage == 3 else None,
    )
    losses, norms = [], []
    for step in range(twin.STEPS):
        parts = list(twin.batch(step, data.get_local_rank(), 2).chunk(MICROBATCHES))
        loss = runner.step([{"input_ids": part, "use_cache": False} for part in parts], parts)
        norm = (
            clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
            if stage == 3
            else optimizer.clip_grad_norm_(twin.CLIP)
        )
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(data.get_group(), loss))
        norms.append(float(norm))
    boxed = {canonical_name(n, p): BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    return losses, norms, twin.full(boxed)


@pytest.mark.parametrize(
    ("name", "stage", "schedule", "driver"),
    [
        ("llama", 1, "1f1b", "hooks"),
        ("llama", 2, "gpipe", "hooks"),
        ("llama", 3, "1f1b", "hooks"),
        ("llama", 3, "1f1b", "actions"),
        ("gpt2", 0, "1f1b", "hooks"),
        ("gpt2", 1, "gpipe", "hooks"),
        ("gpt2", 2, "1f1b", "hooks"),
        ("gpt2", 3, "gpipe", "hooks"),
        ("gpt2", 3, "gpipe", "actions"),
    ],
)
def test_equals_one_process(name: str, stage: int, schedule: str, driver: str):
    losses, norms, final = twin.reference(name)
    for got in run_ranks(4, train, name, stage, schedule, driver):
        assert got[0] == pytest.approx(losses, rel=1e-9)
        assert got[1] == pytest.approx(norms, rel=1e-9)
        assert_same_as_one_device(got[2], final, tolerance=1e-8)
