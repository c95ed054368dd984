"""Page-locked host memory of exactly the size asked for, and a pool of it.

torch's own pinned memory is rounded up to powers of two, which for chunks of hundreds of megabytes wastes up to half of
the host. Here memory is taken from the system and registered with CUDA.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

import torch

SMALL = 2**20  # bytes below which torch's own pinned memory does as well


def host_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat host tensor, [numel], that copies to and from `device` run at full speed with."""
    size = numel * dtype.itemsize
    if device.type != "cuda" or size < SMALL:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    memory = _pages(size)
    if not _register(memory, device):
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)
    return torch.frombuffer(memory, dtype=dtype)


def in_host_memory(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a flat host tensor in such memory."""
    if device.type != "cuda" or tensor.numel() * tensor.element_size() < SMALL:
        return host_memory(tensor.numel(), tensor.dtype, device).copy_(tensor)
    memory = _pages(tensor.numel() * tensor.element_size())
    copied = torch.frombuffer(memory, dtype=tensor.dtype).copy_(tensor)  # all threads touch pages, then
    return copied if _register(memory, device) else copied.pin_memory()


def _register(memory: ctypes.Array, device: torch.device) -> bool:
    """Lock pages for as long as there is the memory; False where the system will not."""
    address = ctypes.addressof(memory)
    if int(torch.cuda.cudart().cudaHostRegister(address, len(memory), 0)) != 0:
        _forget_error(device)
        return False
    end = weakref.finalize(memory, _release, address, device)
    end.atexit = False
    return True


def _pages(size: int) -> ctypes.Array:
    """Memory of whole pages, which no other has a part of: a page can be registered only once.

    The system zeroes it page by page as it is registered, large pages where it has some.
    """
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        area.madvise(mmap.MADV_HUGEPAGE)
    return (ctypes.c_char * size).from_buffer(area)


def _forget_error(device: torch.device) -> None:
    """Let the error of the call before not be taken for that of the next kernel, whose launch would report it."""
    with contextlib.suppress(RuntimeError):
        torch.ones(1, device=device).add_(1)


def _release(address: int, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # copies that were under way when the last holder let go
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _forget_error(device)


class HostPool:
    """Host tensors that are used again.

    Args:
        device: as for `host_memory`.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._free: dict[tuple[int, torch.dtype, bool], list[torch.Tensor]] = {}
        self._taken: dict[int, bool] = {}  # whether they are for copies, by address

    def take(self, numel: int, dtype: torch.dtype, *, copies: bool = True) -> torch.Tensor:
        """A flat tensor with undefined values. `copies`: for copies to and from the device."""
        free = self._free.get((numel, dtype, copies))
        where = self._device if copies else torch.device("cpu")
        tensor = free.pop() if free else host_memory(numel, dtype, where)
        self._taken[tensor.data_ptr()] = copies
        return tensor

    def give(self, tensor: torch.Tensor) -> None:
        """Take back what nobody uses any more; called from any thread. Others' tensors are left to themselves."""
        copies = self._taken.pop(tensor.data_ptr(), None)
        if copies is not None:
            self._free.setdefault((tensor.numel(), tensor.dtype, copies), []).append(tensor)
