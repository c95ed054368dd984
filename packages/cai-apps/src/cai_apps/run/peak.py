"""The memory that ranks have needed so far."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> torch.Tensor:
    """Peak bytes of the rank that needed most: allocated on its GPU, or resident on the host. Collective.

    A scalar float64 on the device; nobody waits for it. Allocations count as soon as the host has made them.
    """
    if device.type == "cuda":
        own = torch.tensor(torch.cuda.max_memory_allocated(device), dtype=torch.float64).pin_memory()
    else:
        own = torch.tensor(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, dtype=torch.float64)
    value = own.to(device, non_blocking=True)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return value
