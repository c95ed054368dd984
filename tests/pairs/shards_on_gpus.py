"""The same shards over NCCL, one process per GPU: `pytest -m gpu tests/pairs/shards_on_gpus.py`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import twin
from shards import DISK, MIXED, STREAMED, Case, train

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


def work(rank: int, folder: str, case: Case) -> None:
    torch.cuda.set_device(rank)
    world = case.shape[0] * case.shape[1]
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world
    )
    losses, norms, weights = train(case)
    torch.save((losses, norms, {n: w.cpu() for n, w in weights.items()}), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "case",
    [
        Case("llama", (1, 2), "host", device="cuda"),
        Case("gpt2", (1, 2), MIXED, device="cuda"),
        Case("llama", (1, 2), "auto", own=False, activations=True, device="cuda"),
        Case("gpt2", (1, 2), "device", keep=True, device="cuda"),
        Case("llama", (2, 1), MIXED, device="cuda"),
        Case("llama", (1, 2), DISK, device="cuda"),
        Case("llama", (1, 2), STREAMED, device="cuda"),
    ],
    ids=str,
)
def test_equals_one_process(tmp_path: Path, case: Case):
    world = case.shape[0] * case.shape[1]
    case = replace(case, folder=tmp_path if case.residency == DISK else None)
    mp.spawn(work, (str(tmp_path), case), nprocs=world)
    found = [torch.load(tmp_path / f"{i}.pt") for i in range(world)]
    twin.assert_equals_one_process(case.name, found, device="cuda")
