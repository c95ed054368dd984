"""The operating system as the NVMe tier sees it: the calls it makes, and what file system a directory lies on."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

MEMORY_TYPES = ("tmpfs", "ramfs")
_OCTAL = re.compile(r"\\([0-7]{3})")


class Syscalls:
    """The system calls of a store, one method each, so that a test can put a failing disk in their place.

    Every method is the function of the same name in `os`, with its exceptions: `OSError` with an errno.
    """

    def open(self, path: str, flags: int) -> int:
        """A descriptor of `path`, mode 0600."""
        return os.open(path, flags, 0o600)

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read at `offset` into `buffers`; how many bytes were read."""
        return os.preadv(descriptor, buffers, offset)

    def pwritev(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write `buffers` at `offset`; how many bytes were written."""
        return os.pwritev(descriptor, buffers, offset)

    def fallocate(self, descriptor: int, offset: int, length: int) -> None:
        """Give the file disk blocks for this range, or raise ENOSPC."""
        os.posix_fallocate(descriptor, offset, length)

    def truncate(self, descriptor: int, length: int) -> None:
        """Cut the file to `length` bytes and free what lies behind."""
        os.ftruncate(descriptor, length)

    def fsync(self, descriptor: int) -> None:
        """Wait until the file's data is on the disk, and hear of write errors."""
        os.fdatasync(descriptor)

    def unlink(self, path: str) -> None:
        """Remove the name; the file lives while a descriptor does."""
        os.unlink(path)

    def close(self, descriptor: int) -> None:
        """Give the descriptor back."""
        os.close(descriptor)

    def free_bytes(self, path: str) -> int:
        """Return the bytes an ordinary user may still write to the file system of `path`."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


@dataclass(frozen=True)
class FileSystem:
    """The file system of a directory, as /proc/self/mountinfo tells it."""

    type: str
    mount_point: str
    source: str

    @property
    def in_memory(self) -> bool:
        """Whether its files are host memory and no disk (tmpfs, ramfs, compressed RAM)."""
        return self.type in MEMORY_TYPES or os.path.basename(self.source).startswith("zram")

    def __str__(self) -> str:
        return f"{self.type} mounted at {self.mount_point} (from /proc/self/mountinfo)"


def file_system(directory: Path, mountinfo: str | None = None) -> FileSystem:
    """The file system that holds `directory`: the last mount whose mount point is its longest prefix.

    Args:
        directory: any existing path.
        mountinfo: the text of /proc/self/mountinfo; None: read it. Where there is none, the type is "unknown".
    """
    if mountinfo is None:
        try:
            mountinfo = Path("/proc/self/mountinfo").read_text()
        except OSError:
            mountinfo = ""
    target = os.path.realpath(directory)
    best, longest = FileSystem("unknown", "/", ""), -1
    for line in mountinfo.splitlines():
        mount, _, device = line.partition(" - ")
        before, after = mount.split(), device.split()
        if len(before) < 5 or len(after) < 2:
            continue
        point = _unescape(before[4])
        inside = target == point or target.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= longest:
            best, longest = FileSystem(after[0], point, _unescape(after[1])), len(point)
    return best


def _unescape(word: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), word)
