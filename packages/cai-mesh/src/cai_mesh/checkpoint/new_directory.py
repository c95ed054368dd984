"""A directory that several ranks write: it appears whole or not at all, and no other job writes it meanwhile."""

from __future__ import annotations

import contextlib
import glob
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cai_mesh.checkpoint.agree import agreed, control_group
from cai_mesh.checkpoint.lock import Lock
from cai_mesh.checkpoint.manifest import fsync
from cai_mesh.errors import CheckpointError


class NewDirectory:
    """A directory on its way.

    Attributes:
        temporary: the place where its files are written.
    """

    def __init__(self, final: Path, save: str):
        self._final, self._save = final, save
        self._group = control_group()
        self._rank = dist.get_rank() if self._group is not None else 0
        self._lock: Lock | None = None
        self.temporary = final.with_name(f"{final.name}.{save}.tmp")

    def write(self, action: Callable[[], Any], *, first: bool = False) -> None:
        """Let every rank write, or the first alone. Collective; all raise the error of any."""
        agreed(lambda: action() if not first or self._rank == 0 else None, self._group)

    def begin(self) -> None:
        """Keep other jobs out, and remove what killed ones have left."""
        self._final.parent.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(self._final.with_name(f"{self._final.name}.lock"), self._save)
        if self._final.exists() and any(self._final.iterdir()):
            raise CheckpointError(f"{self._final} is not empty", fix="export into a new directory")
        for leftover in self._final.parent.glob(f"{glob.escape(self._final.name)}.{'[0-9a-f]' * 32}.tmp"):
            if leftover != self.temporary:
                shutil.rmtree(leftover, ignore_errors=True)
        self.temporary.mkdir()

    def finish(self) -> None:
        """Give the directory its name."""
        assert self._lock is not None
        self._lock.check()
        if self._final.exists():
            self._final.rmdir()
        self.temporary.rename(self._final)
        fsync(self._final.parent)
        self.close()

    def close(self) -> None:
        """Remove what was not finished, and let other jobs in."""
        if self._lock is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self._lock.release()
            self._lock = None


@contextlib.contextmanager
def new_directory(final: Path) -> Iterator[NewDirectory]:
    """Yield a directory to write into, which gets the name `final` at the end. Collective.

    Raises `CheckpointError` on all ranks where the directory is not empty, another job writes it, or a rank cannot.
    """
    directory = NewDirectory(final, agreed(lambda: uuid.uuid4().hex, control_group())[0])
    try:
        directory.write(directory.begin, first=True)
        yield directory
        directory.write(directory.finish, first=True)
    finally:
        directory.close()
