"""Maxima over all ranks after a step: their memory, the signal that asked one to stop, whether one is to save."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist


def greatest_of_ranks(device: torch.device, signal: int, due: bool) -> torch.Tensor:
    """The peak bytes of the rank that needed most, the greatest `signal`, and 1 where any is `due`. Collective.

    Three float64 on the device; nobody waits for them. Bytes are those allocated on a GPU, which count as
    soon as the host has asked for them, or resident on the host.
    """
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        local_maxima = torch.tensor([peak, signal, due], dtype=torch.float64).pin_memory()
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        local_maxima = torch.tensor([peak, signal, due], dtype=torch.float64)
    value = local_maxima.to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value
