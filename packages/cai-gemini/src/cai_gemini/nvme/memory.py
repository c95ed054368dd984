"""Host memory that a disk can reach without a copy: alignment, byte views, page-aligned tensors."""

from __future__ import annotations

import ctypes
import mmap

import torch

from cai_gemini.memory.pinned import host_memory


def view_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor of any dtype, writable, without a copy.

    The view does not keep the tensor alive: whoever uses it holds on to both.
    """
    size = tensor.numel() * tensor.element_size()
    return (
        memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
        if size
        else memoryview(b"")
    )


def address_of(view: memoryview) -> int:
    """Return the address of the first byte of a writable view."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


def aligned(numel: int, dtype: torch.dtype, alignment: int, pin: bool) -> torch.Tensor:
    """An uninitialised flat tensor whose address is a multiple of `alignment`.

    Args:
        numel: elements, at least 1.
        dtype: any dtype.
        alignment: bytes, a power of two.
        pin: page-lock it, for copies to and from a GPU.
    """
    size = numel * dtype.itemsize
    where = torch.device("cuda" if pin else "cpu")
    storage = host_memory(size + alignment, torch.uint8, where)
    shift = -storage.data_ptr() % alignment
    return storage[shift : shift + size].view(dtype)


class Bounce:
    """Page-aligned scratch memory of one thread, made on first use.

    Args:
        size: bytes.
    """

    def __init__(self, size: int):
        self._size = size
        self._map: mmap.mmap | None = None

    def view(self, start: int, stop: int) -> memoryview:
        """Bytes `start` to `stop` of it. Raises `ValueError` when it is smaller than `stop`."""
        if stop > self._size:
            raise ValueError(f"{stop} bytes asked of {self._size}")
        if self._map is None:
            self._map = mmap.mmap(-1, self._size)
        return memoryview(self._map)[start:stop]
