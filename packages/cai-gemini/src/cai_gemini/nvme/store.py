"""`NvmeStore`: tensors in a preallocated file on a disk, read and written in the background.

The disk tier of ZeRO-Infinity (Rajbhandari et al., arXiv:2104.07857): a pool of threads keeps several requests in
flight past the page cache, straight from and into the caller's memory. Every block carries a checksum that never
leaves memory; a region that could not be written whole is unreadable until it has been.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import warnings
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

import torch

from cai_gemini.nvme.disk import ScratchFile, check_directory
from cai_gemini.nvme.engine import Contents, Engine, Request, Spans, Traffic
from cai_gemini.nvme.errors import NvmeError, of_system
from cai_gemini.nvme.memory import aligned
from cai_gemini.nvme.syscalls import Syscalls


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """Space of one tensor in a store; made by `NvmeStore.reserve`.

    Attributes:
        name: the name of the parameter or chunk, for errors.
        numel: elements.
        dtype: the dtype of every tensor written to or read from it.
    """

    name: str
    numel: int
    dtype: torch.dtype
    _contents: Contents = dataclasses.field(repr=False)
    _engine: Engine = dataclasses.field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.numel * self.dtype.itemsize


class Handle:
    """A request under way; a `cai_mesh.protocols.CommHandle`. Its tensor is the store's until `wait` returns."""

    def __init__(self, store: NvmeStore, request: Request):
        self._store, self._request = store, request

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._request.done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Return when the request has ended.

        Raises `NvmeError` when it failed, or when it makes no progress for `timeout` seconds (None: the store's); it
        then stays under way, its tensor with it, and `wait` may be called again.
        """
        self._store._engine.wait(self._request, self._store.timeout if timeout is None else timeout)


class NvmeStore:
    """Tensors on a disk. Use it as a context manager, or `close` it; it also goes with its last reference.

    Args:
        directory: a directory on the disk. The store keeps one file there, without a name, so its space is free again
            when the process ends, however it ends.
        capacity: the most bytes that may be reserved; None: what the disk has. Checked against the free space at once.
        threads: requests in flight. A few saturate one disk; checksums take a core for every 4 GB/s.
        block_bytes: the unit of requests and checksums, a multiple of 4096 (of 65536 for disks with large sectors).
        direct: True: past the page cache (O_DIRECT); False: through it; "auto": past it where the file system can.
        checksums: a CRC-32 for every block, kept in memory, computed by the threads and verified by every read.
        timeout: seconds without progress after which `Handle.wait` gives up.
        require_disk: refuse a directory that lies in memory (tmpfs), where otherwise a warning is given.
        syscalls: the system calls, which tests replace.

    Attributes:
        path: the file, for messages.
        file_system: the directory's file system.
        direct: whether O_DIRECT is in use.
        alignment: bytes that `buffer` aligns to.

    Raises `NvmeError` when the directory is missing, not a directory, not writable, too small for `capacity`, or
    cannot do direct I/O though that was asked for.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        capacity: int | None = None,
        threads: int = 8,
        block_bytes: int = 8 << 20,
        direct: bool | Literal["auto"] = "auto",
        checksums: bool = True,
        timeout: float = 60.0,
        require_disk: bool = False,
        syscalls: Syscalls | None = None,
    ):
        syscalls = syscalls or Syscalls()
        place = Path(directory).absolute()
        if threads < 1 or timeout <= 0:
            raise NvmeError(
                "a store needs a thread and a time",
                got=f"threads={threads}, timeout={timeout}",
                expected="> 0",
            )
        self.timeout, self.capacity = timeout, capacity
        self.file_system = check_directory(place, require_disk)
        _check_free(place, capacity, syscalls)
        file = ScratchFile(place, direct, syscalls, timeout)
        if block_bytes < 1 or block_bytes % file.alignment:
            file.close()
            raise NvmeError(
                "blocks do not fit the disk's sectors",
                got=block_bytes,
                expected=f"a multiple of {file.alignment}",
            )
        self.path, self.direct, self.alignment = file.path, file.direct, file.alignment
        self._file, self._block_bytes = file, block_bytes
        self._growing = threading.Lock()
        self._scratch: list[torch.Tensor] = []
        self._engine = Engine(file, threads, block_bytes, checksums)
        self._end = weakref.finalize(self, self._engine.stop)
        if self.file_system.in_memory:
            warnings.warn(f"{place} is no disk but memory: {self.file_system}", stacklevel=2)

    @property
    def in_memory(self) -> bool:
        """Whether the "disk" is host memory (tmpfs)."""
        return self.file_system.in_memory

    @property
    def traffic(self) -> Traffic:
        """Bytes and requests so far; a copy."""
        return dataclasses.replace(self._engine.traffic)

    @property
    def reserved_bytes(self) -> int:
        """Preallocated bytes of the file, padding included."""
        return self._file.size

    def reserve(self, name: str, numel: int, dtype: torch.dtype, *, zeros: bool = False) -> Region:
        """Preallocate space for a tensor.

        Args:
            name: the name of the parameter or chunk, for errors.
            numel: elements, at least 1.
            dtype: the tensor's dtype.
            zeros: read as zeros what was never written, without touching the disk, as optimizer state starts;
                otherwise reading it is an error.

        Raises `NvmeError` when the capacity or the disk does not have the space; nothing is taken then.
        """
        if numel < 1:
            raise NvmeError(f"an empty region for {name}", got=numel, expected="at least one element")
        size = numel * dtype.itemsize
        padded = -(-size // self.alignment) * self.alignment
        with self._growing:
            if self._file.stopped:
                raise NvmeError(f"cannot reserve space for {name}: the store in {self.path} is closed")
            if self.capacity is not None and self._file.size + padded > self.capacity:
                raise NvmeError(
                    f"the store in {self.path} has no room for {name}",
                    got=f"{padded} bytes beside {self._file.size} in use",
                    expected=f"at most {self.capacity} bytes together (capacity)",
                    fix="raise the capacity, or keep more in host memory",
                )
            position = self._file.grow(padded, name)
        contents = Contents(name, position, size, [None] * -(-size // self._block_bytes), Spans())
        if zeros:
            contents.written.add(0, size)
        return Region(name, numel, dtype, contents, self._engine)

    def buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised flat host tensor that the disk reaches without a copy; pinned where there is CUDA."""
        return aligned(numel, dtype, self.alignment, torch.cuda.is_available())

    def lend_scratch(self, nbytes: int, count: int) -> list[torch.Tensor]:
        """`buffer`s of at least so many bytes for a loop; those of the loop before, where they are large enough.

        To page-lock memory takes longer than to fill it from a disk. Give them back with `keep_scratch`.
        """
        with self._growing:
            buffers, self._scratch = self._scratch, []
        buffers = [buffer for buffer in buffers if buffer.numel() >= nbytes][:count]
        return buffers + [self.buffer(nbytes, torch.uint8) for _ in range(count - len(buffers))]

    def keep_scratch(self, buffers: list[torch.Tensor]) -> None:
        """Keep buffers for the next loop; nothing uses them any more."""
        with self._growing:
            self._scratch = buffers

    def write(
        self, region: Region, tensor: torch.Tensor, offset: int = 0, *, after: Iterable[Handle] = ()
    ) -> Handle:
        """Start writing `tensor` to elements `offset` and on of `region`, behind all earlier requests for it.

        Args:
            region: a region of this store.
            tensor: contiguous, on the CPU, of the region's dtype, any shape; it must be complete (copies from a GPU
                finished) and must not change until the handle's `wait` returns. Memory from `buffer` goes to the disk
                as it is; other memory through a bounce buffer, one block a thread.
            offset: elements. Parts of blocks are read, changed and written back.
            after: requests that must end first.

        If the write fails, the region cannot be read until it has been written whole. Raises `NvmeError` at once for
        a tensor that does not fit, a poisoned region written in part, and a closed store.
        """
        return self._submit("write", region, tensor, offset, after)

    def read(
        self, region: Region, out: torch.Tensor, offset: int = 0, *, after: Iterable[Handle] = ()
    ) -> Handle:
        """Start reading elements `offset` and on of `region` into `out`, behind all earlier writes of it.

        Arguments as for `write`; `out` holds the data once the handle's `wait` has returned, and nothing of use when it
        raises. `wait` raises when a block is not what was written, was never written, or was lost to a failed write.
        """
        return self._submit("read", region, out, offset, after)

    def _submit(
        self,
        kind: Literal["read", "write"],
        region: Region,
        tensor: torch.Tensor,
        offset: int,
        after: Iterable[Handle],
    ) -> Handle:
        if region._engine is not self._engine:
            raise NvmeError(f"{region.name} is a region of another store than {self.path}")
        if tensor.device.type != "cpu" or not tensor.is_contiguous() or tensor.dtype != region.dtype:
            raise NvmeError(
                f"cannot {kind} {region.name} with this tensor",
                got=f"{tensor.dtype} on {tensor.device}, {'' if tensor.is_contiguous() else 'not '}contiguous",
                expected=f"contiguous {region.dtype} on the CPU",
            )
        if offset < 0 or offset + tensor.numel() > region.numel:
            raise NvmeError(
                f"cannot {kind} outside of {region.name}",
                got=f"elements {offset} to {offset + tensor.numel()}",
                expected=f"within 0 to {region.numel}",
            )
        width = region.dtype.itemsize
        start, stop = offset * width, (offset + tensor.numel()) * width
        request = Request(kind, region._contents, tensor, start, stop)
        self._engine.submit(request, [handle._request for handle in after])
        return Handle(self, request)

    def close(self) -> None:
        """Give up what is under way, free the space and the threads.

        Never hangs: a request stuck at the disk is left behind with a warning after `timeout` seconds, and the space
        is freed when it returns. Handles not yet done raise.
        """
        self._end.detach()
        if not self._engine.close(self.timeout):
            warnings.warn(
                f"a request to {self.path} is stuck; its space is freed when it returns", stacklevel=2
            )

    def __enter__(self) -> NvmeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _check_free(directory: Path, capacity: int | None, syscalls: Syscalls) -> None:
    try:
        free = syscalls.free_bytes(str(directory))
    except OSError as error:
        raise of_system(f"cannot use the NVMe directory {directory}", error) from error
    if capacity is not None and capacity > free:
        raise NvmeError(
            f"the disk of {directory} is too small",
            got=f"{free} bytes free",
            expected=f"{capacity} bytes (capacity)",
            fix="free space there, name a larger disk, or keep more in host memory",
        )
