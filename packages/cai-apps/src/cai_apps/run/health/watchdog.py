"""Ends a run in which no step ends any more, and says which rank the others wait for."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from datetime import timedelta

import torch.distributed as dist

from cai_apps.config.environment import hang_limit
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.health.late_ranks import OWN, RankReport, blame, look

TIMES, FLOOR, FIRST, PAUSE = 20.0, 300.0, 1800.0, 3600.0
"""A step may take so many times the median of those before, but so many seconds in any case; and seconds for the first
one, and for what is no step."""
TICK, PATIENCE = 1.0, 15.0
"""Seconds between two looks, and for which the other ranks are asked."""
LONGER = 600.0
"""Seconds that torch's own limit for a collective is above the longest of these: it ends a rank by SIGABRT, and it is
the one that waits."""
TIMED = ("gloo", "nccl")
"""Backends with such a limit: half an hour, and ten minutes."""
ASKED = "cai/hang/asked"


class RunHung(Exception):
    """No step has ended for too long."""


class Watchdog:
    """Watches the steps of this rank from a thread, until it is closed.

    Time counts while the process runs: what is stopped and goes on (SIGSTOP, SIGCONT) has lost nothing. Where steps
    stay out, each rank says through the store where it is, also one whose own time is not up. Then the tracebacks of
    all threads are in crash/, and the process ends with `RunHung`, which the launcher reports.

    Args:
        run: the run's directory, for crash/.
        step: steps that are done.
        at: tells what this rank is at within a step, "" for nothing in particular.

    Raises:
        ConfigError: the environment's limit is no number.
    """

    def __init__(self, run: RunDirectory, step: int, at: Callable[[], str] = str):
        self._run, self._step, self._at = run, step, at
        self._fixed = hang_limit()
        self._seconds: deque[float] = deque(maxlen=50)
        self._idle, self._paused = 0.0, 0
        self._ended, self._ending = threading.Event(), threading.Event()
        self._rank, self._ranks = dist.get_rank(), dist.get_world_size()
        if self._ranks > 1 and self._fixed != 0:
            self._store = dist.PrefixStore("cai/hang", dist.distributed_c10d._get_default_store())
            _be_patient(max(FIRST, PAUSE, self._fixed or 0.0) + LONGER)
            threading.Thread(target=self._watch, name=f"{OWN}watchdog", daemon=True).start()

    def after_step(self, step: int, seconds: float) -> None:
        """Note that a step has ended, which took so many seconds. Does not return once the run has been given up."""
        while self._ending.is_set():
            time.sleep(TICK)
        self._step, self._idle = step, 0.0
        self._seconds.append(seconds)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Give at least `PAUSE` seconds to what is no step: a checkpoint, pictures, an export."""
        self._paused, self._idle = self._paused + 1, 0.0
        try:
            yield
        finally:
            self._paused -= 1
            self._idle = 0.0

    def close(self) -> None:
        self._ended.set()

    @property
    def limit(self) -> float:
        """Seconds that what is under way may take."""
        measured = max(FLOOR, TIMES * statistics.median(self._seconds)) if self._seconds else FIRST
        allowance = measured if self._fixed is None else self._fixed
        return max(allowance, PAUSE) if self._paused else allowance

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._ended.wait(TICK):
            now = time.monotonic()
            self._idle += min(now - before, 2 * TICK)
            before = now
            with contextlib.suppress(
                RuntimeError
            ):  # the store has gone with rank 0: the launcher ends this one
                if self._idle > self.limit or self._store.check([ASKED]):
                    self._end()

    def _end(self) -> None:
        idle = self._idle
        self._store.set(str(self._rank), look(self._step, self._at()).dump())
        self._store.set(ASKED, "1")
        text = f"no step has ended for {idle:.0f} s\n{blame(self._reports())}"
        if self._ended.is_set():  # it went on meanwhile
            return
        self._ending.set()
        error = RunHung(text)
        with contextlib.suppress(OSError):
            self._run.record_crash(self._rank, error)
            with (self._run.crash / f"rank-{self._rank}.txt").open("a", encoding="utf-8") as file:
                file.write("\n" + _stacks())
        _tell(error)
        time.sleep(2 * TICK)  # the launcher ends the others with the first: they write theirs meanwhile
        os._exit(1)

    def _reports(self) -> list[RankReport | None]:
        """Return the reports of all ranks; None for those that do not answer in time."""
        until = time.monotonic() + PATIENCE
        reports: list[RankReport | None] = []
        for rank in range(self._ranks):
            while not (has_report := self._store.check([str(rank)])) and time.monotonic() < until:
                time.sleep(TICK / 4)
            reports.append(RankReport.load(self._store.get(str(rank))) if has_report else None)
        return reports


def _be_patient(seconds: float) -> None:
    """Let collectives of all groups of this rank take so long, at least."""
    for group in list(dist.distributed_c10d._world.pg_map):
        for backend in map(group._get_backend, group._device_types):
            if backend.name() in TIMED and backend.options._timeout.total_seconds() < seconds:
                backend._set_default_timeout(timedelta(seconds=seconds))


def _stacks() -> str:
    """Where every thread is."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        f"thread {names.get(ident, ident)}:\n{''.join(traceback.format_stack(frame))}"
        for ident, frame in sys._current_frames().items()
    )


def _tell(error: RunHung) -> None:
    """Report an error to the launcher, as a rank whose function raises it; without a launcher, print it."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        print(f"error: {error}", file=sys.stderr, flush=True)
        return
    with contextlib.suppress(Exception):
        get_error_handler().record_exception(error)
