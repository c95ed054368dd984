"""Steps of a training session on two GPUs: the host does not wait for the device between a step's start and its end."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from cai_apps import recipes
from cai_apps.applications.language.task import LANGUAGE, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.models import load_model_config

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

STEPS, FIRST = 6, 4
"""Of the steps before the first that counts, one is measured for a schedule and one shown."""
PIPELINE = {"parallel.shard": 1, "parallel.pipeline.size": 2}
V = PIPELINE | {"parallel.pipeline.chunks": 2, "parallel.pipeline.schedule": "dualpipe-v"}
LAYOUTS = {
    "zero-3": {"parallel.shard": 2, "parallel.zero": 3},
    "tensor": {"parallel.shard": 1, "parallel.tensor.size": 2},
    "1f1b": PIPELINE,
    "dualpipe-v": V | {"parallel.zero": 3, "parallel.pipeline.unshard": "step"},
    "auto": PIPELINE | {"parallel.pipeline.schedule": "auto"},
    "fp8 wire": PIPELINE | {"parallel.pipeline.wire": "fp8"},
}


@contextmanager
def waits() -> Iterator[set[str]]:
    """Where the host waits for the device, filled while the context lasts."""
    found: set[str] = set()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_: (
            found.add("".join(traceback.format_stack(limit=12))) if "synchronizing" in str(message) else None
        )
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def work(rank: int, folder: str, settings: dict) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    config = recipes.load("llama-tiny", settings)
    model = load_model_config(config.model.name)
    config = LANGUAGE.resolve(config, 2)
    session = apply(config, workload(config, model), device=device)
    count = config.train.global_batch // config.train.microbatch_size // config.parallel.shard
    shape = (count, config.train.microbatch_size, 64)
    ids = torch.randint(0, model.vocab_size, shape, generator=torch.Generator().manual_seed(0)).to(device)
    batches = [{"input_ids": each, "labels": each} for each in ids]
    found: set[str] = set()
    for step in range(STEPS):
        torch.cuda.synchronize()
        with waits() as seen:
            loss = session.step(batches, total=1000.0)
            session.update(1e-3, session.norm())
        if step >= FIRST:
            found |= seen
        assert loss.isfinite()
    torch.save(sorted(found), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_nobody_waits_for_the_device(tmp_path: Path, layout: str, samples: int) -> None:
    settings = {"train.microbatch_size": samples, "train.global_batch": 8 * samples, "train.compile": "off"}
    alone = {"parallel.tensor.size": 1, "parallel.pipeline.size": 1, "precision.compute": "bf16"}
    arguments = (str(tmp_path), alone | settings | LAYOUTS[layout])
    torch.multiprocessing.spawn(work, arguments, nprocs=2, join=True)
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == []
