"""Residencies of the shards of the twin's model, and ways to train on them."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

import torch
import twin
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from cai_gemini import ChunkResidency, Tiers, Tuning, offload_activations
from cai_gemini.planning import Rates
from cai_mesh import BoxedTensor, clip_grad_norm_
from cai_zero import Gather, no_sync, shard_module

SLOW_HOST = Rates(to_device=2e6, to_host=1e6, both=2e6, host_step=4e6, device_step=4e12)
ROOMY, MIXED, DISK = 10**7, Tiers(0.6, 0.3), Tiers(0.5, 0.2, disk=0.6, disk_weights=0.3)
STREAMED = Tiers(0.5, 0.2, streamed=0.6)


def planned(
    residency: str | Tiers = MIXED, memory: int = ROOMY, nvme: str | None = None, **options
) -> ChunkResidency:
    tuning = Tuning(rates=SLOW_HOST, **options)
    return ChunkResidency(residency, device_memory=memory, nvme=nvme, tuning=tuning)


def adamw(params) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


@dataclass(frozen=True)
class Case:
    """A way to train the twin's model.

    Args:
        own: clip by the optimizer, on the device; else by `cai_mesh.clip_grad_norm_`.
        plain: step with the optimizer itself, which knows of no residency.
        keep: parameters stay unsharded from forward to backward.
        device: that trains.
        folder: on a disk, for what is to be there.
    """

    name: str
    shape: tuple[int, int]
    residency: str | Tiers
    own: bool = True
    plain: bool = False
    activations: bool = False
    keep: bool = False
    device: str = "cpu"
    folder: Path | None = None

    def __str__(self) -> str:
        marks = [name for name in ("own", "plain", "activations", "keep") if getattr(self, name)]
        return "-".join([self.name, "x".join(map(str, self.shape)), str(self.residency), *marks])


def train(case: Case):
    mesh = init_device_mesh(case.device, case.shape, mesh_dim_names=("dp_replicate", "dp_shard"))
    data, memory = mesh._flatten("data"), ROOMY if case.device == "cpu" else 10**9
    residency = planned(case.residency, memory, None if case.folder is None else str(case.folder))
    gather = Gather(reshard_after_forward=not case.keep, prefetch_bytes=40_000)
    model = shard_module(twin.build(case.name).to(case.device), mesh, residency=residency, gather=gather)
    if case.activations:
        offload_activations(model, keep=0, smallest=0)
    plain = adamw(model.parameters())
    optimizer = plain if case.plain else residency.optimizer(plain)
    losses, norms = [], []
    for step in range(twin.STEPS):
        ids, loss = twin.batch(step, data.get_local_rank(), data.size()).to(case.device), 0.0
        for i, part in enumerate(
            ids.chunk(2)
        ):  # gradients are reduced after every other backward of odd steps
            with no_sync(model) if i == 0 and step % 2 else contextlib.nullcontext():
                half = twin.loss_of(model(input_ids=part, use_cache=False).logits, part) / 2
                half.backward()
                loss += half.detach()
        norms.append(float(clipped(case.own, optimizer, model, mesh)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(twin.mean_over(data.get_group(), loss))
    boxed = {n: BoxedTensor.from_param(p) for n, p in model.named_parameters()}
    assert residency._engine.planned is not case.plain
    assert any(chunk.disk is not None for chunk in residency._engine.chunks) == (case.folder is not None)
    return losses, norms, twin.full(boxed)


def clipped(own: bool, optimizer, model: nn.Module, mesh) -> torch.Tensor:
    if own:
        return optimizer.clip_grad_norm_(twin.CLIP)
    return clip_grad_norm_(model.parameters(), twin.CLIP, mesh)
