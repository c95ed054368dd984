"""What tests do on every rank: a mesh over all of them, and full tensors from the parts that each holds."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.layout import BoxedTensor


def line() -> DeviceMesh:
    """All ranks, as shards of the data."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model that all ranks hold a part of, or of one in a process of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return {n: BoxedTensor.from_param(p).to_full(group) for n, p in model.named_parameters()}


def full_values(state: dict) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's boxes, without what is no box; ranks may hold parts of different names."""
    boxes = {n: box for n, box in state.items() if isinstance(box, BoxedTensor)}
    held: list = [None] * dist.get_world_size()
    dist.all_gather_object(held, {n: (b.global_shape, b.dtype) for n, b in boxes.items()})
    known = {n: what for names in held for n, what in names.items()}
    return {n: boxes.get(n, BoxedTensor(*known[n], ())).to_full(dist.group.WORLD) for n in sorted(known)}
