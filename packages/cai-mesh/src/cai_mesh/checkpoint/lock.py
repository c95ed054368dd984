"""A lock on a shared file system, made of what commits rest on as well: the rename of a directory is atomic.

The lock is a directory with one file for each save under way, named by the save's id; the file says who holds it.

- Taking it renames a directory made beside onto it, which fails unless the lock is absent or empty.
- Letting go, or breaking what a dead process left, removes one file by its name: no newer lock can be hit by it.
- Further saves of the process that holds it join: they move a file into it, and back out if it is another's by then.

Clocks are never compared. A holder on this machine is asked after by its process id and start; of one elsewhere the
file is watched for a sign of life.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from cai_mesh.errors import CheckpointError

BEAT = 5.0
"""Seconds between two signs of life of a holder."""
PATIENCE = 60.0
"""Seconds without a sign of life after which a holder on another machine counts as dead."""
ABANDONED = 3600.0
"""Seconds after which what was prepared for taking a lock and never used is removed, if its process is not known."""


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock.

    Args:
        host: its machine, by name.
        pid: its process id there.
        job: the job it is part of: a scheduler's or launcher's id, or else its command line.
        since: the time at which it took the lock by its own clock, for people.
        place: kernel and process name space that `pid` belongs to; empty where the system does not say.
        started: the start of the process, as the kernel counts; empty where the system does not say.
    """

    host: str
    pid: int
    job: str
    since: str
    place: str
    started: str

    @staticmethod
    def me() -> Holder:
        """This process, from now on."""
        since = datetime.now(UTC).isoformat(timespec="seconds")
        started = _process(os.getpid())[1]
        return Holder(socket.gethostname(), os.getpid(), job_name(), since, _place(), started)

    @staticmethod
    def read(path: Path) -> Holder | None:
        """Return the writer of a lock's file; None when it does not say.

        Raises `FileNotFoundError` when the holder has let go.
        """
        try:
            return Holder(**json.loads(path.read_text()))
        except (ValueError, TypeError):
            return None

    @property
    def is_near(self) -> bool:
        """Whether `pid` is a process id of this machine."""
        return (self.host, self.place) == (socket.gethostname(), _place())

    @property
    def is_me(self) -> bool:
        """Whether this is the process that asks."""
        return self.is_near and (self.pid, self.started) == (os.getpid(), _process(os.getpid())[1])

    @property
    def is_running(self) -> bool:
        """Whether the process is there, if it is near: neither ended nor replaced by another of its number."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:  # another user's
            pass
        state, started = _process(self.pid)
        return state not in ("Z", "X") and started in ("", self.started)

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}, job {self.job}"


def job_name() -> str:
    """Return the name of this job for people: the id its scheduler or launcher gave it, or else its command line."""
    for name in ("SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        if os.environ.get(name, "none") != "none":
            return f"{name}={os.environ[name]}"
    return " ".join(sys.argv)[:200] or "python"


def _place() -> str:
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{kernel} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _process(pid: int) -> tuple[str, str]:
    """State and start of a process as the kernel gives them; empty where it gives none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", ""
    return fields[0], fields[19]


class Lock:
    """A lock that this process holds for one save.

    Args:
        path: the lock, beside what it protects. Its directory must exist.
        save: id of the save, or of what else is done under the lock.
        doing: the holder's work, in an error.

    Raises `CheckpointError` that names the holder when another process that lives holds it. Waits for at most
    `PATIENCE` seconds, and only for one on another machine that gives no sign of life; takes over from the dead.
    """

    def __init__(self, path: Path, save: str, *, doing: str = "saving"):
        self.path, self.doing, self._file = path, doing, path / save
        self._ended = threading.Event()
        prepared = path.with_name(f"{path.name}.{save}")
        prepared.mkdir()
        try:
            (prepared / save).write_text(json.dumps(asdict(Holder.me()), indent=1))
            watch = _Watch()
            while not self._took(prepared):
                watch.make_way(self)
            threading.Thread(target=self._beat, name="checkpoint lock", daemon=True).start()
        except BaseException:
            self.release()
            raise
        finally:
            shutil.rmtree(prepared, ignore_errors=True)

    @property
    def saves(self) -> set[str]:
        """Ids of the saves under way: this one, and others of this process."""
        return {file.name for file in _files(self.path)}

    def check(self) -> None:
        """Raise `CheckpointError` unless the lock is still this save's."""
        if not self._file.exists():
            raise CheckpointError(
                f"the lock {self.path} is not this save's any more",
                cause=f"it was deleted, or this process gave no sign of life for {PATIENCE:.0f} s and another job "
                "took over",
                fix="make sure that one job at a time saves there, then save again",
            )

    def release(self) -> None:
        """Let go. Once is enough; more do no harm."""
        self._ended.set()
        with contextlib.suppress(OSError):
            self._file.unlink()
        with contextlib.suppress(OSError):  # other saves hold it, or somebody has taken it
            self.path.rmdir()

    def _beat(self) -> None:
        while not self._ended.wait(BEAT):
            with contextlib.suppress(OSError):  # `check` tells whether it matters
                os.utime(self._file)

    def _took(self, prepared: Path) -> bool:
        """Try once to put this save's file into the lock."""
        try:
            os.rename(prepared, self.path)
            return True
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        if not self._is_mine():
            return False
        waiting = prepared / self._file.name
        try:
            os.rename(waiting, self._file)
        except FileNotFoundError:  # let go of since
            return False
        if self._is_mine():
            return True
        os.rename(self._file, waiting)
        return False

    def _is_mine(self) -> bool:
        """Whether the lock is held, and by nothing but this process."""
        holders = [holder for _, holder, _ in _held(self.path)]
        return bool(holders) and all(holder is not None and holder.is_me for holder in holders)


class _Watch:
    """The observations of a lock's holders by a process that waits for it."""

    def __init__(self) -> None:
        self._seen: dict[str, tuple[int, float]] = {}

    def make_way(self, lock: Lock) -> None:
        """Break what the dead hold; raise for the living; wait a little for those who may be either."""
        for file, holder, beat in _held(lock.path):
            if holder is not None and holder.is_near:
                if holder.is_me:
                    continue
                dead = not holder.is_running
            else:
                first, since = self._seen.setdefault(file.name, (beat, time.monotonic()))
                if beat == first and time.monotonic() - since < PATIENCE:
                    continue
                dead = beat == first
            if not dead:
                raise _is_held(lock, holder)
            with contextlib.suppress(FileNotFoundError):
                file.unlink()
        if self._seen:
            time.sleep(BEAT / 10)


def _is_held(lock: Lock, holder: Holder | None) -> CheckpointError:
    return CheckpointError(
        f"another job is {lock.doing}: it holds {lock.path}",
        got=holder or "a job that did not say who it is, and gives signs of life",
        expected="one job at a time",
        cause="two jobs were given the same directory, or the one before this one has not ended yet",
        fix="take another directory, or end that job and try again (nothing need be deleted: what a dead process holds "
        "is taken over)",
    )


def _files(path: Path) -> list[Path]:
    try:
        return [Path(entry.path) for entry in os.scandir(path)]
    except FileNotFoundError:
        return []


def _held(path: Path) -> Iterator[tuple[Path, Holder | None, int]]:
    """File, holder and last sign of life of each save in a lock. Opening a file makes a network file system look."""
    for file in _files(path):
        with contextlib.suppress(FileNotFoundError), file.open("rb") as opened:
            yield file, Holder.read(file), os.fstat(opened.fileno()).st_mtime_ns


def sweep(path: Path) -> None:
    """Remove what processes that were killed while they took the lock have left beside it."""
    for prepared in path.parent.glob(f"{path.name}.*"):
        holders = list(_held(prepared))
        near = [holder for _, holder, _ in holders if holder is not None and holder.is_near]
        with contextlib.suppress(FileNotFoundError):
            last = max([beat / 1e9 for _, _, beat in holders], default=prepared.stat().st_mtime)
            if not near[0].is_running if near else time.time() - last > ABANDONED:
                shutil.rmtree(prepared, ignore_errors=True)
