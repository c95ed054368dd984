"""What tests do on every rank: a mesh over all of them, and full tensors from the parts that each holds."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.layout import BoxedTensor, FlatChunk
from cai_zero.replicated import halves, optimizer


def line() -> DeviceMesh:
    """All ranks, as shards of the data."""
    return dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))


def full_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of a model that all ranks hold a part of, or of one in a process of its own."""
    group = dist.group.WORLD if dist.is_initialized() else None
    return {n: BoxedTensor.from_param(p).to_full(group) for n, p in model.named_parameters()}


@contextlib.contextmanager
def rounding_away_from_zero() -> Iterator[None]:
    """Inside, whole master weights round as halves do: halfway between two numbers, to the one farther from zero."""
    fill, gather = FlatChunk.fill, optimizer.gather_weights

    def filled(chunk, out, tensors):
        wide = out.float() if out.dtype is torch.bfloat16 else out
        fill(chunk, wide, tensors)
        if wide is not out:
            halves.split(wide, out)

    def gathered(compression, unsharded, shard, group, **options):
        mine = unsharded if group is None else unsharded.view(group.size(), -1)[group.rank()]
        if shard.dtype is torch.float32:
            halves.split(shard.detach(), mine)
        return gather(compression, unsharded, mine, group, **options)

    with patch.object(FlatChunk, "fill", filled), patch.object(optimizer, "gather_weights", gathered):
        yield


def full_values(state: dict) -> dict[str, torch.Tensor]:
    """Full tensors from every rank's boxes, without what is no box; ranks may hold parts of different names."""
    boxes = {n: box for n, box in state.items() if isinstance(box, BoxedTensor)}
    held: list = [None] * dist.get_world_size()
    dist.all_gather_object(held, {n: (b.global_shape, b.dtype) for n, b in boxes.items()})
    known = {n: what for names in held for n, what in names.items()}
    return {n: boxes.get(n, BoxedTensor(*known[n], ())).to_full(dist.group.WORLD) for n in sorted(known)}
