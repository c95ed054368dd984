"""The end of a rank from outside: by a signal, by the death of its launcher or of another rank.

A thread waits for all three, as Python runs signal handlers in the main thread only, and that may be waiting for a
rank that is gone.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable

import torch.distributed as dist

from cai_apps.config.environment import launcher_pid
from cai_apps.run.exit_codes import FAILURE, STOPPED
from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.health.last_activity import read_at

SAME_SIGNAL_SECONDS = 1.0
"""A signal so soon after the first is the first: a terminal sends one to all, and a launcher passes it on."""

LEAVING_SECONDS = 0.5
"""How much later than another a rank may close its guard at the end of a run."""

PEER_SECONDS = 5.0
"""How long a rank that lost another has to fail by itself, with a traceback."""


class Guard:
    """The watch over one rank, from its start to its end.

    Args:
        run: the run's directory, in which it is written why a rank ended; None: not known yet.
    """

    def __init__(self, run: RunDirectory | None = None):
        self.run, self.rank = run, int(os.environ.get("RANK", "0"))
        self.asked = 0
        """The signal that asked this rank to stop; 0: none did."""
        self._since, self._closed = 0.0, False
        self.doing: Callable[[], str] = str
        """Tells what all ranks do."""
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = socket.socketpair()
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ, self._on_signal)
        threading.Thread(target=self._watch, name="guard", daemon=True).start()
        launcher = launcher_pid()
        if launcher is not None:
            self._watch_process(launcher, self._end_without_launcher)

    def take_signals(self) -> None:
        """Let SIGTERM and SIGINT set `asked` from now on; a SIGINT after that ends the process at once."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.set_wakeup_fd(self._wake.fileno(), warn_on_full_buffer=False)
        for number in STOPPED:
            signal.signal(number, _leave_to_the_guard)

    def leave_signals(self) -> None:
        """Let both signals end the process again, as they do by default."""
        if threading.current_thread() is not threading.main_thread():
            return
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.set_wakeup_fd(-1)

    def watch_ranks(self, doing: Callable[[], str], at_file: str | None) -> None:
        """Watch the other ranks of this machine.

        Collective.

        Args:
            doing: as the attribute, for the file of a rank that dies.
            at_file: the file in which this rank says what it is at.
        """
        self.doing = doing
        local_process = (_process_space(), os.getpid(), at_file)
        processes: list[tuple[str, int, str | None]] = [local_process] * dist.get_world_size()
        if len(processes) == 1:
            return
        dist.all_gather_object(processes, local_process)
        for rank, (space, pid, file) in enumerate(processes):
            if space == local_process[0] and pid != local_process[1]:
                self._watch_process(pid, lambda rank=rank, file=file: self._end_without_rank(rank, file))

    def close(self) -> None:
        """End the watch: whatever dies from now on, this rank goes on."""
        self._closed = True

    def _watch_process(self, pid: int, on_end: Callable[[], None]) -> None:
        if not hasattr(os, "pidfd_open"):  # not on Linux
            return
        try:
            self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, on_end)
        except ProcessLookupError:
            on_end()

    def _watch(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select(timeout=1.0):
                key.data()

    def _on_signal(self) -> None:
        for number in self._woken.recv(64):
            if number not in STOPPED:
                continue
            if not self.asked:
                self.asked, self._since = number, time.monotonic()
            elif (
                signal.SIGINT in (number, self.asked) and time.monotonic() - self._since > SAME_SIGNAL_SECONDS
            ):
                os._exit(STOPPED[number])

    def _end_without_launcher(self) -> None:
        self._record(self.rank, f"rank {self.rank} ended itself: its launcher is gone\n")
        os._exit(FAILURE)

    def _end_without_rank(self, rank: int, at_file: str | None) -> None:
        at = read_at(at_file)  # at once: the launcher removes the file
        time.sleep(LEAVING_SECONDS)
        if not self._closed:
            self._record(rank, f"rank {rank} died in {self.doing()}{at} and left no traceback\n")
            time.sleep(PEER_SECONDS)
        if not self._closed:
            self._record(self.rank, f"rank {self.rank} ended itself: rank {rank} is gone\n")
            os._exit(FAILURE)

    def _record(self, rank: int, text: str) -> None:
        """Write why a rank ended, unless something says so already."""
        if self.run is None or self._closed:
            return
        with contextlib.suppress(OSError), (self.run.crash / f"rank-{rank}.txt").open("x") as file:
            file.write(text)


def _leave_to_the_guard(*_: object) -> None:
    """Python's part of a signal handler; the number goes to the guard's thread."""


def _process_space() -> str:
    """Names the machine, and the container on it, in which a process number means something."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {os.readlink('/proc/self/ns/pid')}"
    return socket.gethostname()
