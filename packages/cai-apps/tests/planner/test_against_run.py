"""The plan's model state against the tensors of a real run."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from cai_apps import recipes
from cai_apps.applications.language.plan import plan
from cai_apps.applications.language.task import workload
from cai_apps.applications.language.validation import resolve
from cai_apps.compose.apply import apply
from cai_apps.compose.models import load_model_config
from cai_mesh.comm import coordinate
from cai_mesh.testing import RankError, RankPool, run_ranks

LAYOUTS = {
    "one rank": (1, {"parallel.zero": 0}),
    "one rank, bf16": (1, {"parallel.zero": 1, "precision.compute": "bf16"}),
    "zero 1": (2, {"parallel.zero": 1, "parallel.shard": 2}),
    "zero 2, bf16": (2, {"parallel.zero": 2, "parallel.shard": 2, "precision.compute": "bf16"}),
    "zero 3": (2, {"parallel.zero": 3, "parallel.shard": 2}),
    "zero 3, bf16": (2, {"parallel.zero": 3, "parallel.shard": 2, "precision.compute": "bf16"}),
    "context": (2, {"parallel.zero": 3, "parallel.context.size": 2}),
    "tensor": (2, {"parallel.zero": 0, "parallel.tensor.size": 2}),
    "pipeline": (2, {"parallel.zero": 1, "parallel.pipeline.size": 2}),
    "eight-bit moments": (2, {"parallel.zero": 1, "parallel.shard": 2, "optimizer.state": "int8"}),
    "muon": (2, {"parallel.zero": 1, "parallel.shard": 2, "optimizer.kind": "muon"}),
    "lamb, pipeline": (2, {"parallel.zero": 0, "parallel.pipeline.size": 2, "optimizer.kind": "lamb"}),
    "samples clipped": (2, {"parallel.zero": 2, "parallel.shard": 2, "optimizer.clip_samples": 1.0}),
    "lars": (1, {"parallel.zero": 0, "optimizer.kind": "lars"}),
}
ALONE = {
    "parallel.shard": 1,
    "parallel.tensor.size": 1,
    "parallel.pipeline.size": 1,
    "data.sequence_length": 8,
    "train.global_batch": 4,
    "train.microbatch_size": 1,
}


def live_bytes() -> int:
    """Bytes of all storages that some tensor of this process refers to."""
    gc.collect()
    found = {}
    for thing in gc.get_objects():
        plain = type(thing) in (
            torch.Tensor,
            torch.nn.Parameter,
        )  # others hold these, or are of a test's graphs
        if plain and thing.device.type == "cpu":
            storage = thing.untyped_storage()
            with contextlib.suppress(RuntimeError):  # what has given its memory away
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def measure(config) -> tuple[int, int]:
    """(stage, most bytes of model state between microbatches of a step after the first).

    Under ZeRO-3 blocks are unsharded while a microbatch runs, so there the state is measured after the last.
    """
    before = live_bytes()
    model_config = load_model_config(config.model.name)
    config = resolve(config, model_config, torch.distributed.get_world_size())
    session = apply(config, workload(config, model_config), device=torch.device("cpu"))
    ids = torch.zeros(1, config.data.sequence_length, dtype=torch.int64)
    batches = [{"input_ids": ids, "labels": ids} for _ in range(config.parallel.pipeline.microbatches)]
    session.step(batches, total=1)
    session.update(1e-3, float(session.norm()))
    seen = []
    if config.parallel.zero < 3:
        session.model.register_forward_pre_hook(lambda *_: seen.append(live_bytes() - before))
    session.step(batches, total=1)
    return coordinate(session.mesh)["pp"], max([*seen, live_bytes() - before])


@pytest.fixture(scope="module")
def fresh():
    """Ranks that have run no other test: what one has left there, and goes meanwhile, would be missing."""
    pool = RankPool()
    yield lambda ranks, function, *arguments: pool.run(ranks, function, arguments, 180.0, {})
    pool.close()


@pytest.mark.parametrize("ranks, changes", LAYOUTS.values(), ids=LAYOUTS)
def test_model_state_is_within_3_percent(ranks, changes, fresh):
    config = recipes.load("llama-tiny", {**ALONE, **changes})
    planned = [stage.state.total for stage in plan(config).stages]
    for stage, measured in fresh(ranks, measure, config):
        assert measured == pytest.approx(planned[stage], rel=0.03)


def placed(config):
    """Bytes on the host before anything is planned."""
    model_config = load_model_config(config.model.name)
    config = resolve(config, model_config, 1)
    session = apply(config, workload(config, model_config), device=torch.device("cpu"))
    return session.weights.offloaded.placement().host_bytes


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_host_bytes_of_an_offloaded_model_are_exact(compute):
    changes = {"precision.compute": compute, "memory.residency": "host", "memory.device_memory": None}
    config = recipes.load("llama-tiny-offload", changes)
    assert run_ranks(1, placed, config) == [plan(config).offload.host]


def test_the_smallest_device_memory_is_where_training_begins_to_refuse():
    planned = plan(recipes.load("llama-tiny-offload"))
    least = planned.offload.smallest - planned.stages[0].activations
    fits, short = (
        recipes.load("llama-tiny-offload", {"memory.device_memory": nbytes}) for nbytes in (least, least - 1)
    )
    run_ranks(1, placed, fits)
    with pytest.raises(RankError, match="too small for one layer at a time"):
        run_ranks(1, placed, short)
