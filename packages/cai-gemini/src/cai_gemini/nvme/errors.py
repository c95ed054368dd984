"""`NvmeError`: what a disk did wrong, to which parameter, and what to do about it."""

from __future__ import annotations

import errno
import os

from cai_mesh.errors import CaiError

_FULL = ("the disk or the quota is full", "free space there, or name a larger disk")
_BROKEN = (
    "the disk or its connection fails",
    "look at the kernel's log (dmesg) and the disk's health (smartctl), name another disk, resume from a checkpoint",
)
_DENIED = ("the user may not write there", "change the directory's owner or mode, or name another directory")
_KNOWN = {
    errno.ENOSPC: _FULL,
    errno.EDQUOT: _FULL,
    errno.EIO: _BROKEN,
    errno.ENXIO: _BROKEN,
    errno.ENODEV: _BROKEN,
    errno.EREMOTEIO: _BROKEN,
    errno.ESTALE: ("the network file system lost the file", "use a disk of this machine"),
    errno.EACCES: _DENIED,
    errno.EPERM: _DENIED,
    errno.EROFS: ("the file system is mounted read-only", "remount it, or name another directory"),
    errno.EFBIG: (
        "a limit on the size of files",
        "raise it (ulimit -f), or use a file system that takes larger files",
    ),
    errno.EMFILE: ("too many open files", "raise the limit (ulimit -n)"),
    errno.ENOENT: ("the directory does not exist, or its disk is not mounted", "create or mount it"),
    errno.ENOTDIR: ("part of the path is a file", "name a directory"),
    errno.EINVAL: ("the file system refuses such requests", "open the store with direct=False"),
    errno.EOPNOTSUPP: (
        "the file system cannot do this",
        "use a local file system such as ext4 or xfs",
    ),
}


class NvmeError(CaiError):
    """A disk that is missing, full, slow, failing or lying, or a request that a store cannot serve."""


def of_system(what: str, error: OSError) -> NvmeError:
    """The error for a failed system call; cause and fix follow its errno."""
    cause, fix = _KNOWN.get(error.errno or 0, ("", "use a local file system such as ext4 or xfs"))
    name = errno.errorcode.get(error.errno or 0, "no errno")
    text = error.strerror or (os.strerror(error.errno) if error.errno else str(error))
    return NvmeError(what, got=f"{text} ({name})", cause=cause, fix=fix)
