"""Mixes of residencies with a disk among them, and what offloaded training keeps there."""

from __future__ import annotations

import offloaded
import torch

from cai_gemini import Tiers

MIXES = [
    "nvme",
    Tiers(disk=0.5),
    Tiers(1.0, 0.3, 0.4),
    Tiers(disk=1.0, disk_weights=0.5),
    Tiers(0.5, 0.2, disk=0.8, disk_weights=0.6),
    Tiers(1.0, 0.0, disk=1.0, disk_weights=1.0),
]
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "plain": lambda p: torch.optim.SGD(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, centered=True, momentum=0.5),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-2, amsgrad=True, foreach=True),
}


def moved(model, opt, place, residency="nvme", **options):
    return offloaded.moved(model, opt, residency, nvme=place, **options)


def on_disk(optimizer):
    return [chunk for chunk in optimizer._engine.chunks if chunk.disk is not None]


def in_memory(chunk):
    """Bytes of master weights and state that the chunk has on the host."""
    states = [] if chunk.step is None else [chunk.step.state_of(i) for i in range(len(chunk.unit.kept))]
    tensors = [chunk.unit.shard, *(v for state in states for v in state.values() if v.dim())]
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)
