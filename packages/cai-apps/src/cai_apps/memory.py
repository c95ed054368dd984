"""The memory a process has needed so far."""

from __future__ import annotations

import resource

import torch
import torch.distributed as dist


def peak_memory(device: torch.device) -> int:
    """Peak bytes of the rank that needed most: allocated on its GPU, or resident on the host. Collective."""
    if device.type == "cuda":
        own = torch.cuda.max_memory_allocated(device)
    else:
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    value = torch.tensor(own, dtype=torch.int64, device=device)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(value, dist.ReduceOp.MAX)
    return int(value)
