"""Ranks that begin with the same weights: those that differ get the first rank's."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

CHUNK, PRIME = 2**22, 8191
"""Elements that are looked at together, and the period of the weights of their places."""


@torch.no_grad()
def make_alike(model: nn.Module, mesh: Any, device: torch.device) -> None:
    """Give all ranks the first one's values of parameters and buffers that differ between ranks. Collective.

    Args:
        model: the whole module, on any device.
        mesh: the mesh of all ranks.
        device: the device on which ranks talk.
    """
    if mesh.size() == 1:
        return
    everything = (*model.parameters(), *model.buffers())
    tensors = [tensor for tensor in everything if not tensor.is_meta and tensor.numel()]
    if not tensors:
        return
    sums = torch.stack([_digest(tensor) for tensor in tensors]).to(device)
    least, most = sums.clone(), sums.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    differs = (~(least == most)).any(-1).tolist()
    for tensor, other in zip(tensors, differs, strict=True):
        if other:
            values = tensor.to(device).contiguous()
            dist.broadcast(values, 0)
            tensor.copy_(values)


def _digest(tensor: Tensor) -> Tensor:
    """Return two float64 numbers that hardly any other values of this shape have, [2]: a sum, and one by places."""
    total = torch.zeros(2, dtype=torch.float64)
    for values in tensor.detach().flatten().split(CHUNK):
        wide = values.float() if values.is_floating_point() else values.double()
        places = torch.arange(1, len(wide) + 1, device=wide.device, dtype=wide.dtype)
        by_place = (wide * (places % PRIME)).sum(dtype=torch.float64)
        total += torch.stack([wide.sum(dtype=torch.float64), by_place]).cpu()
    return total
