"""cai-zero as the gradient sync of a pipeline equals one process; gpt2 ties its embeddings over the stages."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

import pytest
import torch
import twin
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_mesh.gradients import Deferred
from cai_mesh.layout import canonical_name
from cai_mesh.testing import run_ranks
from cai_pipeline import PipelineRunner, split
from cai_pipeline.plans.placement import Placement
from cai_zero import shard_module, shard_optimizer, sharding_of
from cai_zero.stage3.gathering import Gatherer

MICROBATCHES = 4


def _runner(model: Any, mesh: DeviceMesh, schedule: str, sync: Any, stage: int) -> PipelineRunner:
    """With the mean loss of a step's microbatches; of stage 3 the schedule may drive the sharding."""
    return PipelineRunner(
        model,
        mesh,
        schedule=schedule,
        microbatches=MICROBATCHES,
        loss_fn=lambda output, ids: twin.loss_of(output.logits, ids) / MICROBATCHES,
        grad_sync=sync,
        sharding=sync if stage == 3 else None,
    )


def train(
    name: str,
    stage: int,
    schedule: str,
    driver: Literal["hooks", "actions"] = "hooks",
    placement: Placement | None = None,
    pipeline: int = 2,
):
    mesh = init_device_mesh("cpu", (pipeline, 4 // pipeline), mesh_dim_names=("pp", "dp_shard"))
    model = split(twin.build(name), mesh, chunks=2 if placement else 1, placement=placement or "loop")
    if stage == 3:
        sync = sharding_of(shard_module(model, mesh, driver=driver))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = sync = shard_optimizer(plain, mesh, model=model, stage=stage)
    runner = _runner(model, mesh, schedule, sync, stage)

    def clip():
        if stage == 3:
            return clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
        return optimizer.clip_grad_norm_(twin.CLIP)

    losses, norms = twin.train(twin.in_microbatches(runner, MICROBATCHES), clip, optimizer, mesh["dp_shard"])
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
        ("gpt2", 0, "zb-h1", "hooks"),
        ("gpt2", 1, "zb-h1", "hooks"),
        ("llama", 2, "zb-h1", "hooks"),
        ("gpt2", 3, "zb-h1", "hooks"),
        ("llama", 3, "zb-h1", "actions"),
        ("gpt2", 1, "auto", "hooks"),
    ],
)
def test_equals_one_process(name: str, stage: int, schedule: str, driver: str):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, stage, schedule, driver))


@pytest.mark.parametrize("driver", ["hooks", "actions"])
@pytest.mark.parametrize(
    ("name", "schedule", "placement"),
    [
        ("llama, 4 layers", "interleaved", "loop"),
        ("gpt2, 4 layers", "interleaved", "loop"),
        ("gpt2, 4 layers", "bfs", "v"),
        ("gpt2, 4 layers", "zb-v", "v"),
        ("gpt2, 4 layers", "auto", "v"),
    ],
)
def test_zero_3_of_several_stages_a_rank(name: str, schedule: str, placement: Placement, driver: str):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, 3, schedule, driver, placement))


@pytest.mark.parametrize(
    ("name", "stage", "schedule", "placement"),
    [
        ("llama, 4 layers", 0, "bfs", "v"),
        ("gpt2, 4 layers", 1, "interleaved", "loop"),
        ("gpt2, 4 layers", 2, "interleaved", "loop"),
        ("gpt2, 4 layers", 1, "bfs", "v"),
        ("gpt2, 4 layers", 2, "bfs", "v"),
        ("gpt2, 4 layers", 1, "zb-v", "v"),
        ("gpt2, 4 layers", 1, "v-half", "v"),
        ("llama, 4 layers", 0, "v-min", "v"),
        ("gpt2, 4 layers", 1, "dualpipe-v", "v"),
    ],
)
def test_zero_of_several_stages_a_rank(name: str, stage: int, schedule: str, placement: Placement):
    twin.assert_equals_one_process(name, run_ranks(4, train, name, stage, schedule, "hooks", placement))


@pytest.mark.parametrize(
    ("stage", "schedule", "driver", "placement", "pipeline"),
    [
        (1, "zb-h1", "hooks", None, 2),
        (3, "interleaved", "actions", "loop", 2),
        (3, "zb-v", "hooks", "v", 2),
        (1, "1f1b", "hooks", None, 4),
        (3, "1f1b", "actions", None, 4),
    ],
)
def test_an_encoder_decoder(
    stage: int, schedule: str, driver: str, placement: Placement | None, pipeline: int
):
    """Its embeddings are on the first stage, on that where the decoder begins, and on the last."""
    results = run_ranks(4, train, "bart", stage, schedule, driver, placement, pipeline)
    twin.assert_equals_one_process("bart", results)


def waiting(stage: int, driver: Literal["hooks", "actions"]) -> list[int]:
    """How many weight gradients each action W of a step makes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    model = split(twin.build("llama"), mesh)
    if stage == 3:
        sync = sharding_of(shard_module(model, mesh, driver=driver))
    else:
        plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
        sync = shard_optimizer(plain, mesh, model=model, stage=stage)
    runner = _runner(model, mesh, "zb-h1", sync, stage)
    made: list[int] = []
    flush = Deferred.flush

    def counted(self: Deferred) -> None:
        made.append(sum(kept.operands is not None for kept in self._kept))
        flush(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Deferred, "flush", counted)
        twin.in_microbatches(runner, MICROBATCHES)(twin.batch(0))
    return made


@pytest.mark.parametrize(("stage", "driver"), [(0, "hooks"), (1, "hooks"), (3, "actions")])
def test_weight_gradients_wait_for_their_action(stage: int, driver: str):
    layer, end = 7, 1  # linear layers, and the embedding or the head
    assert run_ranks(4, waiting, stage, driver) == [[layer + end] * MICROBATCHES] * 4


def gathers(driver: Literal["hooks", "actions"], chunks: int) -> set[int]:
    """How often the units of a model with 4 microbatches are gathered in its second step."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp_shard"))
    model = split(twin.build("llama, 4 layers"), mesh, chunks=chunks)
    sync = sharding_of(shard_module(model, mesh, driver=driver))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    runner = _runner(model, mesh, "interleaved", sync, 3)
    backward, seen = twin.in_microbatches(runner, MICROBATCHES), Counter[int]()
    gather = Gatherer._gather

    def counted(self: Gatherer, part: Any, coming: Any) -> Any:
        seen[id(part)] += 1
        return gather(self, part, coming)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gatherer, "_gather", counted)
        for step in range(2):
            seen.clear()
            backward(twin.batch(step))
            optimizer.step()
            optimizer.zero_grad()
    return set(seen.values())


@pytest.mark.parametrize("chunks", [1, 2])
def test_a_schedule_gathers_once_a_step(chunks: int):
    assert run_ranks(4, gathers, "actions", chunks) == [{1}] * 4
    assert all(max(found) >= MICROBATCHES for found in run_ranks(4, gathers, "hooks", chunks))
