"""One scratch file: made, probed for direct I/O, preallocated, read and written to the last byte.

The file loses its name as soon as it is open. Its space is returned when the process ends, however it ends, so there is
nothing to sweep up after a crash and nothing that two processes in one directory could confuse.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import stat
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from cai_gemini.nvme.errors import NvmeError, of_system
from cai_gemini.nvme.syscalls import FileSystem, Syscalls, file_system

ALIGNMENTS = (4096, 16384, 65536)
_EMPTY_REPLIES = 8


def check_directory(directory: Path, require_disk: bool) -> FileSystem:
    """The file system of a scratch directory.

    Raises `NvmeError` when the directory is missing or a file, or when it lies in memory and `require_disk` is set.
    """
    try:
        mode = os.stat(directory).st_mode
    except OSError as error:
        raise of_system(f"cannot use the NVMe directory {directory}", error) from error
    if not stat.S_ISDIR(mode):
        raise NvmeError(f"the NVMe directory {directory} is a file", fix="name a directory")
    system = file_system(directory)
    if system.in_memory and require_disk:
        raise NvmeError(
            f"the NVMe directory {directory} lies in memory",
            got=system,
            expected="a file system on a disk",
            fix="name a directory on an NVMe disk, or set residency='host' to use host memory",
        )
    return system


class Stopped(Exception):
    """The store was closed while a transfer was under way."""


class ScratchFile:
    """A nameless file that grows by preallocation.

    Args:
        directory: an existing directory.
        direct: True: O_DIRECT, or an error; False: through the page cache; "auto": O_DIRECT where it works.
        syscalls: the system calls.
        patience: seconds for which EAGAIN is answered by trying again.

    Attributes:
        path: the name it had, for messages.
        direct: whether O_DIRECT is in use.
        alignment: the bytes that addresses, offsets and lengths are multiples of when `direct`; regions start on it.
        size: preallocated bytes.
        stopped: set it and transfers raise `Stopped` before their next system call.

    Raises `NvmeError` when the file cannot be made or direct I/O is asked for and refused.
    """

    def __init__(self, directory: Path, direct: bool | Literal["auto"], syscalls: Syscalls, patience: float):
        self._sys, self._patience = syscalls, patience
        self.path = str(directory / f"cai-nvme-{os.getpid()}-{secrets.token_hex(4)}")
        self.size, self.stopped = 0, False
        self.direct, self.alignment = False, ALIGNMENTS[0]
        if direct and self._open(os.O_DIRECT, required=direct is True):
            self.direct = True
            try:
                if self._probe():
                    return
                if direct is True:
                    raise _no_direct(self.path, f"requests aligned to {ALIGNMENTS[-1]} bytes are refused")
            except NvmeError:
                self.close()
                raise
            self._sys.close(self._descriptor)
            self.direct, self.alignment = False, ALIGNMENTS[0]
        self._open(0, required=True)

    def _open(self, extra: int, required: bool) -> bool:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | extra
        try:
            self._descriptor = self._sys.open(self.path, flags)
            self._sys.unlink(self.path)
        except OSError as error:
            if extra and error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                if os.path.exists(self.path):  # some file systems refuse the flag after making the file
                    self._sys.unlink(self.path)
                if required:
                    raise _no_direct(self.path, os.strerror(error.errno)) from error
                return False
            raise of_system(f"cannot make the scratch file {self.path}", error) from error
        return True

    def _probe(self) -> bool:
        """Find the smallest alignment at which a block comes back as written; whether there is one."""
        for self.alignment in ALIGNMENTS:
            sent, back = mmap.mmap(-1, self.alignment), mmap.mmap(-1, self.alignment)
            sent[:] = bytes(range(256)) * (self.alignment // 256)
            try:
                self.write([memoryview(sent)], 0)
                self.read([memoryview(back)], 0)
                self._sys.truncate(self._descriptor, 0)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    continue
                raise of_system(f"cannot use the scratch file {self.path}", error) from error
            if back[:] != sent[:]:
                raise NvmeError(
                    f"the scratch file {self.path} does not return what was written to it",
                    cause="the disk or its connection fails",
                    fix="name another directory",
                )
            return True
        return False

    def grow(self, size: int, what: str) -> int:
        """Preallocate `size` more bytes for `what`; return where they start. Raises `NvmeError`, with nothing taken."""
        start = self.size
        try:
            self._sys.fallocate(self._descriptor, start, size)
        except OSError as error:
            with contextlib.suppress(OSError):
                self._sys.truncate(self._descriptor, start)
            failure = of_system(f"cannot reserve {size} bytes for {what} in {self.path}", error)
            free = self._sys.free_bytes(os.path.dirname(self.path))
            raise NvmeError(
                failure.what,
                got=f"{failure.got}; {free} bytes are free, {start} are this store's",
                cause=failure.cause,
                fix=failure.fix,
            ) from error
        self.size += size
        return start

    def read(self, views: Sequence[memoryview], offset: int) -> None:
        """Fill `views` from `offset` on. Raises `OSError`, or `Stopped`."""
        self._transfer(self._sys.preadv, views, offset)

    def write(self, views: Sequence[memoryview], offset: int) -> None:
        """Write all of `views` at `offset`. Raises `OSError`, or `Stopped`."""
        self._transfer(self._sys.pwritev, views, offset)

    def _transfer(self, call, views: Sequence[memoryview], offset: int) -> None:
        total, done, empty = sum(len(view) for view in views), 0, 0
        unit = self.alignment if self.direct else 1
        deadline = time.monotonic() + self._patience
        while done < total:
            if self.stopped:
                raise Stopped
            try:
                moved = call(self._descriptor, _behind(views, done), offset + done)
            except InterruptedError:
                continue
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.001)
                continue
            # A direct request can only go on at an aligned offset; the rest of a partial unit is asked for again.
            moved = moved if done + moved == total else moved // unit * unit
            done += moved
            empty = 0 if moved else empty + 1
            if empty == _EMPTY_REPLIES:
                raise OSError(errno.EIO, f"the request ended after {done} of {total} bytes")

    def sync(self) -> None:
        """Wait for the disk. Raises `OSError`."""
        self._sys.fsync(self._descriptor)

    def close(self) -> None:
        """Free the space and the descriptor; errors no longer matter to anyone."""
        with contextlib.suppress(OSError):
            self._sys.truncate(self._descriptor, 0)
        with contextlib.suppress(OSError):
            self._sys.close(self._descriptor)


def _behind(views: Sequence[memoryview], done: int) -> list[memoryview]:
    rest = []
    for view in views:
        if done < len(view):
            rest.append(view[done:])
        done = max(0, done - len(view))
    return rest


def _no_direct(path: str, got: str) -> NvmeError:
    return NvmeError(
        f"no direct I/O for {path}",
        got=got,
        expected="a file system with O_DIRECT",
        fix="use direct='auto' or direct=False, which go through the page cache, or ext4 or xfs on a disk",
    )
