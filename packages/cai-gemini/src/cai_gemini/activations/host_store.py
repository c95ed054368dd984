"""Tensors that wait in host memory between forward and backward, and the copies that take them there and back.

No memory is marked as used by the copying streams (`record_stream`): the allocator would then hand it out again only
once the device has caught up with the host, and much of it would lie idle. Whoever sends or brings a tensor keeps it
until the compute stream has waited for the copy; from there on the order of that stream protects it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.pinned import host_memory
from cai_mesh.errors import PlanError


@dataclass(frozen=True)
class _Leaving:
    """A tensor whose copy to the host is under way, kept until the compute stream has waited for it."""

    tensor: torch.Tensor
    version: int
    copied: Copied


class HostStore:
    """Host memory for tensors of one device, and those on their way there.

    Memory is kept for reuse. The smallest free piece that is large enough is taken; where there is none, the largest
    free one is given up for a new one, so that there are never more pieces than tensors were offloaded at once.

    Args:
        device: a CUDA device, or the CPU, whose tensors are copied in host memory.
        in_flight: groups of tensors that may be on their way to the host at once.
    """

    def __init__(self, device: torch.device, in_flight: int):
        self.copies, self._in_flight = Copies(device), in_flight
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()  # backward runs in a thread of its own
        # by finalizers, which may run in a thread that has the lock
        self._returned: deque[torch.Tensor] = deque()
        self._leaving: deque[list[_Leaving]] = deque()
        self.nbytes = 0

    def begin(self) -> None:
        """A group of tensors will leave: the compute stream waits for the oldest if that would be one too many.

        Raises `PlanError` when a tensor was changed in place while it was copied.
        """
        self.arrive(self._in_flight - 1)
        self._leaving.append([])

    def send(self, tensor: torch.Tensor) -> OffloadedTensor:
        """Start to copy a dense tensor, of the group that was begun last; it must not be changed in place."""
        piece = self._take(tensor.numel() * tensor.element_size())
        offloaded = OffloadedTensor(self, piece, tensor)
        source = tensor.detach()  # of the same memory and version, without what it was computed from
        copied = self.copies.to_host(offloaded.host, source, hold=True)
        self._leaving[-1].append(_Leaving(source, source._version, copied))
        return offloaded

    def arrive(self, most: int = 0) -> None:
        """Let the compute stream wait until at most so many groups are on their way, and let go of the others."""
        while len(self._leaving) > most:
            for leaving in self._leaving.popleft():
                leaving.copied.wait()
                check_version(leaving.tensor, leaving.version)

    def _take(self, nbytes: int) -> torch.Tensor:
        with self._lock:
            while self._returned:
                self._free.append(self._returned.popleft())
            fitting = [piece for piece in self._free if piece.numel() >= nbytes]
            if fitting:
                piece = min(fitting, key=torch.Tensor.numel)
                self._remove(piece)
                return piece
            if self._free:
                largest = max(self._free, key=torch.Tensor.numel)
                self._remove(largest)
                self.nbytes -= largest.numel()
                if largest.is_pinned():
                    torch.cuda.synchronize(self.copies.device)  # it returns to the system
            self.nbytes += nbytes
        return host_memory(nbytes, torch.uint8, self.copies.device)

    def _remove(self, piece: torch.Tensor) -> None:
        self._free = [other for other in self._free if other is not piece]

    def give_back(self, piece: torch.Tensor) -> None:
        """Take back host memory; the compute stream has waited for every copy from it."""
        self._returned.append(piece)


class OffloadedTensor:
    """A tensor in host memory. Its memory there returns to the store when nobody has this any more.

    Args:
        store: the store that the memory returns to.
        piece: host memory of at least its bytes.
        tensor: dense, of any strides, which are kept.
    """

    def __init__(self, store: HostStore, piece: torch.Tensor, tensor: torch.Tensor):
        self._store, self._piece = store, piece
        self.shape, self.stride, self.dtype = tensor.shape, tensor.stride(), tensor.dtype
        used = piece[: tensor.numel() * tensor.element_size()].view(tensor.dtype)
        self.host = used.as_strided(self.shape, self.stride)
        self._back: torch.Tensor | None = None
        self._coming: Copied | None = None
        self._claims = 0

    def claim(self) -> None:
        """Start the copy to the device, unless it is there for somebody else already; a `take` must follow."""
        self._claims += 1
        if self._back is None:
            copies = self._store.copies
            self._back = torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=copies.device)
            self._coming = copies.to_device(self._back, self.host, copies.mark(), hold=True)

    def take(self) -> torch.Tensor:
        """The tensor on the device, usable by the compute stream. It is dropped here with the last claim."""
        assert self._back is not None and self._coming is not None
        self._coming.wait()
        tensor, self._claims = self._back, self._claims - 1
        if not self._claims:
            self._back = self._coming = None
        return tensor

    def __del__(self) -> None:
        if self._coming is not None:  # brought for a backward that never came
            self._coming.wait()
        self._store.give_back(self._piece)


@dataclass(frozen=True)
class ResidentTensor:
    """A tensor that stays where it is; like `OffloadedTensor`, without copies. An inference tensor has no version."""

    tensor: torch.Tensor
    version: int | None

    def claim(self) -> None:
        """Nothing to start."""

    def take(self) -> torch.Tensor:
        """The tensor. Raises `PlanError` when it was changed in place."""
        if self.version is not None:
            check_version(self.tensor, self.version)
        return self.tensor


def check_version(tensor: torch.Tensor, version: int) -> None:
    """Raise `PlanError` when a tensor is no longer of `version`: recompute would start from other values."""
    if tensor._version != version:
        raise PlanError(
            "an input of a block was changed in place after the block had been called with it",
            got=f"a tensor of shape {tuple(tensor.shape)}, changed {tensor._version - version} time(s)",
            cause="the block is run again in backward, from its inputs",
            fix="change a copy instead, as with x = x + y in place of x += y",
        )


def is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether a tensor fills its memory without gaps or overlaps, in any order of dims."""
    expected = 1
    for size, step in sorted(zip(shape, stride, strict=True), key=lambda dim: (dim[1], dim[0])):
        if size != 1:
            if step != expected:
                return False
            expected *= size
    return True
