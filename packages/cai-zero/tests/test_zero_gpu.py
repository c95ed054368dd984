"""The stages over NCCL and copy engines, one process per GPU, against one process; and that a step never waits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from zero_models import Language, train_plainly

from cai_mesh.comm import peer
from cai_mesh.gradients import clip_grad_norm_
from cai_mesh.layout import BoxedTensor
from cai_mesh.storage import finding
from cai_zero import Gather, MixedPrecision, shard_module, shard_optimizer

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]
STEPS, VOCAB, WIDTH, CLIP = 6, 512, 256, 0.5
DTYPES = {
    "fp32": MixedPrecision(),
    "bf16": MixedPrecision(compute=torch.bfloat16),
    "halves": MixedPrecision(compute=torch.bfloat16, split_master=True),
}


def build(compiled: bool = False) -> Language:
    torch.manual_seed(0)
    model = Language(VOCAB, WIDTH, 6, widen=4).cuda()
    for layer in model.layers if compiled else ():
        layer.forward = torch.compile(layer.forward)
    return model


def ids_of(step: int, rank: int, world: int) -> torch.Tensor:
    ids = torch.randint(0, VOCAB, (8, 128), generator=torch.Generator().manual_seed(step))
    return ids.chunk(world)[rank].cuda()


def loss_of(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids[:, :-1]).flatten(0, 1).float()
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten())


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, fused=True)


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = build()

    def whole(model: nn.Module, step: int) -> torch.Tensor:
        return loss_of(model, ids_of(step, 0, 1))

    losses, _ = train_plainly(model, adamw(model.parameters()), whole, STEPS, CLIP)
    return losses, {n: p.detach().cpu() for n, p in model.named_parameters()}


def work(rank: int, world: int, folder: str, stage: int, copies: bool, compiled: bool, dtypes: str) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    finding.ALONE_ELEMENTS = 1024  # embedding and head are units of their own
    peer.PIECE_BYTES = 100_000  # copy engines reduce in several pieces, the last one shorter
    mesh = init_device_mesh("cuda", (world,), mesh_dim_names=("dp_shard",))
    model = build(compiled)
    precision = DTYPES[dtypes]
    if stage == 3:
        shard_module(model, mesh, precision=precision, gather=Gather(copy_engines=copies))
        optimizer = adamw(model.parameters())
    else:
        optimizer = shard_optimizer(
            adamw(model.parameters()),
            mesh,
            model=model,
            stage=stage,
            precision=precision,
            overlap_gather=stage > 0,
            copy_engines=copies,
        )
    losses = []
    for step in range(STEPS):
        ids = ids_of(step, rank, world)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if step > 2 else "default")  # a step that waits raises
        loss = loss_of(model, ids)
        loss.backward()
        if stage == 3:
            clip_grad_norm_(model.parameters(), CLIP, mesh)
        else:
            optimizer.clip_grad_norm_(CLIP)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.set_sync_debug_mode("default")
        loss = loss.detach()
        dist.all_reduce(loss)
        losses.append(float(loss) / world)
    if stage == 3:
        held = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    else:
        held = optimizer.weights()
    names = [n for n, _ in model.named_parameters()]
    empty = {n: BoxedTensor(tuple(p.shape), torch.float32, ()) for n, p in build().named_parameters()}
    full = {n: held.get(n, empty[n]).to_full(dist.group.WORLD) for n in names}
    torch.save((losses, full), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


CASES = [
    (0, False, False, "fp32"),
    (1, False, False, "fp32"),
    (1, True, True, "fp32"),
    (2, True, False, "fp32"),
    (3, False, False, "fp32"),
    (3, True, False, "fp32"),
    (3, True, True, "fp32"),
    (3, True, True, "bf16"),
    (1, True, False, "bf16"),
    (0, False, False, "halves"),
    (1, True, True, "halves"),
    (2, False, False, "halves"),
]


@pytest.mark.parametrize(("stage", "copies", "compiled", "dtypes"), CASES)
def test_equals_one_process_and_never_waits(tmp_path: Path, stage, copies, compiled, dtypes):
    world = min(torch.cuda.device_count(), 4)
    torch.backends.cuda.matmul.allow_tf32 = False
    mp.spawn(work, (world, str(tmp_path), stage, copies, compiled, dtypes), nprocs=world)
    losses, weights = plain()
    for rank in range(world):
        got, full = torch.load(tmp_path / f"{rank}.pt")
        assert got == pytest.approx(losses, abs=1e-5 if dtypes == "fp32" else 2e-2)
        for name, value in full.items():
            bound = 1e-4 if dtypes == "fp32" else 1e-2
            assert torch.allclose(value, weights[name], atol=bound), name
