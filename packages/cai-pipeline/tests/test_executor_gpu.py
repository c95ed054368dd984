"""The executor over NCCL: one process per GPU, against one process on one GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_families import build, config_of, sum_tied_gradients, token_ids
from pipeline_models import build as build_other
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from cai_mesh.layout import canonical_name
from cai_pipeline import PipelineRunner, split

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

MICROBATCHES = 4
LENGTH = 512


def batch(family: str) -> list[torch.Tensor]:
    """Token ids whose activations are far larger than what NCCL buffers, of two lengths."""
    lengths, samples = [LENGTH, LENGTH // 2, LENGTH, LENGTH // 2], 16 if family == "t5" else 64
    return [token_ids(m, batch=samples, length=length).cuda() for m, length in enumerate(lengths)]


def inputs_of(family: str, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """An encoder reads twice as many tokens as its decoder."""
    if family == "t5":
        return {"input_ids": torch.cat([ids, ids.flip(1)], 1), "decoder_input_ids": ids}
    return {"input_ids": ids}


def loss_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return cross_entropy(output.logits.flatten(0, 1).float(), target.flatten(), reduction="sum") / 1e5


def model_of(family: str, dtype: torch.dtype) -> Any:
    if family == "t5":
        return build_other("t5").to("cuda", dtype)
    config = config_of(family, 6)
    config.max_position_embeddings = LENGTH
    return build(config).to("cuda", dtype)


def work(rank: int, world: int, folder: str, family: str, schedule: str, dtype: torch.dtype) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("pp",))
    model = split(model_of(family, dtype), mesh)
    runner = PipelineRunner(model, mesh, schedule=schedule, microbatches=MICROBATCHES, loss_fn=loss_of)
    inputs = [inputs_of(family, ids) for ids in batch(family)]
    losses = []
    for _ in range(3):
        model.zero_grad()
        losses.append(float(runner.step(inputs, batch(family))))
    sum_tied_gradients(model)
    evaluated = float(runner.evaluate(inputs, batch(family)))
    gradients = {canonical_name(n, p): p.grad.cpu() for n, p in model.named_parameters()}
    torch.save((losses, evaluated, gradients), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(
    ("family", "dtype", "tolerance"),
    [
        ("llama", torch.float64, 1e-9),
        ("gpt2", torch.float64, 1e-9),
        ("t5", torch.float64, 1e-9),
        ("llama", torch.bfloat16, 1e-6),
    ],
)
def test_training_over_nccl(
    tmp_path: Path, family: str, dtype: torch.dtype, tolerance: float, schedule: str
) -> None:
    world = min(torch.cuda.device_count(), 4)
    arguments = (world, str(tmp_path), family, schedule, dtype)
    torch.multiprocessing.spawn(work, arguments, nprocs=world, join=True)
    model = model_of(family, dtype)
    expected = 0.0
    for ids in batch(family):
        loss = loss_of(model(**inputs_of(family, ids)), ids)
        loss.backward()
        expected += float(loss.detach().double())
    gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
    for rank in range(world):
        losses, evaluated, found = torch.load(tmp_path / f"{rank}.pt")
        assert [*losses, evaluated] == pytest.approx([expected] * 4, rel=tolerance)
        for name, gradient in found.items():
            scale = float(gradients[name].abs().max())
            limit = (1e-8 if dtype is torch.float64 else 0.05) * scale
            assert float((gradient - gradients[name]).abs().max()) <= limit, name
