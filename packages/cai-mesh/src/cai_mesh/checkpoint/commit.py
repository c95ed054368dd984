"""The commit protocol on one file system: lock, temporary directory, manifest, fsync, rename. No tensors, no ranks."""

from __future__ import annotations

import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

from cai_mesh.checkpoint import lock as locks
from cai_mesh.checkpoint.lock import Lock
from cai_mesh.checkpoint.manifest import MANIFEST, STEP, Manifest, fsync, problems, save_of
from cai_mesh.errors import CheckpointError
from cai_mesh.files.paths import remove

LOCK = "save.lock"
BESIDE = 2**20
"""Bytes that are kept free for what stands beside the tensors of a checkpoint."""
_LEFT = re.compile(r"step-\d+(?:\.([0-9a-f]{32}))?\.(tmp|deleting)")


class Draft:
    """A checkpoint that is being written. All ranks know its names; one of them begins, commits and closes it.

    Args:
        directory: the directory of checkpoints.
        step: the step to be saved.
        save: id of the save, 32 hexadecimal digits, the same on all ranks. It is in the name of the temporary
            directory, so that no two saves ever write into one.
    """

    def __init__(self, directory: Path, step: int, save: str):
        self.step, self.save = step, save
        self.final = directory / f"step-{step}"
        self.temporary = directory / f"step-{step}.{save}.tmp"
        self._lock: Lock | None = None

    def begin(self, nbytes: int) -> None:
        """Take the directory's lock, remove what killed saves have left, and make the temporary directory.

        A damaged checkpoint of the step is moved aside, not deleted. Raises `CheckpointError` when a good one exists,
        another job holds the lock, or the disk has no room for `nbytes`.
        """
        directory = self.final.parent
        directory.mkdir(parents=True, exist_ok=True)
        self._lock = Lock(directory / LOCK, self.save)
        _sweep(directory, self._lock)
        if self.final.exists():
            if not problems(self.final):
                raise _exists(self.final)
            _set_aside(self.final)
        _check_room(directory, nbytes)
        self.temporary.mkdir()

    def commit(self, files: Mapping[str, tuple[int, str]], keep_last: int | None) -> Path:
        """Write the manifest, force everything to disk and rename; then drop the oldest beyond `keep_last`; close.

        Raises `CheckpointError` when a file is not there or not this save's, the lock was lost, or the step was
        committed meanwhile.
        """
        assert self._lock is not None
        for name, (size, _) in files.items():
            _check_part(self.temporary / name, size, self.save)
        manifest = self.temporary / MANIFEST
        manifest.write_text(Manifest(self.step, self.save, locks.job_name(), files).dump())
        fsync(manifest)
        fsync(self.temporary)
        self._lock.check()
        try:
            self.temporary.rename(self.final)
        except OSError:
            if self.final.exists():
                raise _exists(self.final) from None
            raise
        fsync(self.final.parent)
        if keep_last is not None:
            _prune(self.final, keep_last, self.save)
        self.close()
        return self.final

    def close(self) -> None:
        """Remove the temporary directory, if it was not committed, and let go of the lock, if this process has it."""
        if self._lock is not None:
            shutil.rmtree(self.temporary, ignore_errors=True)
            self._lock.release()
            self._lock = None


def _check_room(directory: Path, nbytes: int) -> None:
    free = shutil.disk_usage(directory).free
    if free < nbytes + BESIDE:
        raise CheckpointError(
            f"the disk has no room for a checkpoint in {directory}",
            got=f"{free / 2**20:,.1f} MiB free",
            expected=f"{(nbytes + BESIDE) / 2**20:,.1f} MiB; with a limit on how many are kept, the old one goes after "
            "the new one is there",
            fix="make room or save elsewhere; earlier checkpoints are untouched",
        )


def _exists(final: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {final} exists", fix="resume from it, or train into another directory"
    )


def _set_aside(final: Path) -> None:
    free = (final.with_name(f"{final.name}.damaged-{i}") for i in range(1 << 16))
    final.rename(next(path for path in free if not path.exists()))


def _check_part(path: Path, size: int, save: str) -> None:
    """Raise unless a file that a rank says it wrote is there, whole, and of this save."""
    got = f"{path.stat().st_size} bytes of save {save_of(path)}" if path.is_file() else "no file"
    if got != f"{size} bytes of save {save}":
        raise CheckpointError(
            f"{path} is not what a rank wrote",
            got=got,
            expected=f"{size} bytes of save {save}",
            cause="the ranks do not see one directory, or something else changed the file",
            fix="save into a directory on a file system that all ranks share",
        )


def _prune(current: Path, keep_last: int, save: str) -> None:
    """Delete the oldest checkpoints beyond `keep_last`, never `current`. What cannot be deleted is told, not raised."""
    for old in steps(current.parent)[:-keep_last]:
        if old == current:
            continue
        doomed = old.with_name(f"{old.name}.{save}.deleting")
        try:
            old.rename(doomed)
        except FileNotFoundError:  # somebody else has deleted it
            continue
        except OSError as error:
            warnings.warn(f"{old} could not be deleted for keep_last: {error}", stacklevel=2)
            continue
        remove(doomed)


def _sweep(directory: Path, lock: Lock) -> None:
    """Remove what saves and deletions that were killed have left behind."""
    leftovers = [(path, match) for path in directory.iterdir() if (match := _LEFT.fullmatch(path.name))]
    under_way = lock.saves
    for path, match in leftovers:
        if match[2] == "deleting" or match[1] not in under_way:
            remove(path)
    locks.sweep(lock.path)


def steps(directory: str | os.PathLike) -> list[Path]:
    """Committed checkpoints below a directory, oldest step first, damaged ones included."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    numbered = [
        (int(m[1]), path)
        for path in directory.iterdir()
        if (m := STEP.fullmatch(path.name)) and path.is_dir()
    ]
    return [path for _, path in sorted(numbered)]


def latest(directory: str | os.PathLike) -> Path | None:
    """The newest committed checkpoint below a directory, not verified; None when there is none."""
    committed = steps(directory)
    return committed[-1] if committed else None
