"""Page-locked host memory of exactly the size asked for, and a pool of it.

torch's own pinned memory is rounded up to powers of two, which for chunks of hundreds of megabytes wastes up to half of
the host. Here memory is taken from the system and registered with CUDA.
"""

from __future__ import annotations

import ctypes
import weakref

import torch

SMALL = 2**20  # bytes below which torch's own pinned memory does as well


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat host tensor, [numel], that copies to and from `device` run at full speed with."""
    size = numel * dtype.itemsize
    if device.type != "cuda" or size < SMALL:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    memory = (ctypes.c_char * size)()
    address = ctypes.addressof(memory)
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, 0)) != 0:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    end = weakref.finalize(memory, _release, address, device)
    end.atexit = False
    return torch.frombuffer(memory, dtype=dtype)


def _release(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies that were under way when the last holder let go
    torch.cuda.cudart().cudaHostUnregister(address)


class HostPool:
    """Host tensors that are used again.

    Args:
        device: as for `host_memory`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: dict[tuple[int, torch.dtype], list[torch.Tensor]] = {}
        self._lent: set[int] = set()  # addresses

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor with undefined values."""
        free = self._free.get((numel, dtype))
        tensor = free.pop() if free else host_memory(numel, dtype, self._device)
        self._lent.add(tensor.data_ptr())
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what nobody uses any more; called from any thread. Others' tensors are left to themselves."""
        if tensor.data_ptr() not in self._lent:
            return
        self._lent.discard(tensor.data_ptr())
        self._free.setdefault((tensor.numel(), tensor.dtype), []).append(tensor)
