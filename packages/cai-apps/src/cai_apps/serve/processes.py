"""The processes of the ranks that compute one model together, from their start to their end.

Whatever one of them dies of, its pipe ends; one that is stuck is known by its pulse. Either is the end of all.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from cai_apps.serve.rank import WorkerOptions, run_rank
from cai_apps.serve.wire import Failed, Pipes, Ready
from cai_mesh.errors import ConfigError

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from cai_apps.serve.wire import Order, Refused, Step

PRELOAD = (
    "torch",
    "transformers.models.llama.modeling_llama",
    "cai_apps.applications.language.generate",
    "cai_apps.serve.rank",
)
"""Modules that all workers share."""
STOP_SECONDS = 5.0
"""Seconds that a worker has to end before it is killed."""
SILENT_SECONDS = 5.0
"""Seconds after which a rank that says nothing is taken for stuck; it says something every half second."""
TICK_SECONDS = 0.5
"""Seconds from one look at all pulses to the next."""
REASON_SECONDS = 0.5
"""Seconds in which ranks that end at the start say why: the one that is at fault may not be heard first."""


def prepare_workers() -> None:
    """Start the process that workers are forked from, which imports meanwhile what they need.

    Signals to all processes of a terminal or a service do not end it: the server does.
    """
    multiprocessing.set_forkserver_preload([*PRELOAD])
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        forkserver.ensure_running()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Processes:
    """The processes of one model.

    Args:
        options: the model and its ranks.
        step_seconds: seconds after which a step that does not end is taken for stuck.
    """

    def __init__(self, options: WorkerOptions, step_seconds: float):
        self._options, self._step_seconds = options, step_seconds
        self._pulses: list[Connection] = []
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._ended = threading.Event()

    def start(self) -> None:
        """Start them; `wait` says when the model can be asked."""
        context = multiprocessing.get_context("forkserver")
        ranks = range(self._options.ranks)
        self._connection, server = context.Pipe()
        pulses = [context.Pipe(duplex=False) for _ in ranks]
        pairs = [context.Pipe() for _ in ranks[1:]]
        self._pulses = [ours for ours, _ in pulses]
        followers = tuple(one for one, _ in pairs)
        pipes = [Pipes(pulses[0][1], server=server, followers=followers)]
        pipes += [Pipes(pulse, first=other) for (_, pulse), (_, other) in zip(pulses[1:], pairs, strict=True)]
        for rank in ranks:
            process = context.Process(
                target=run_rank, args=(pipes[rank], self._options, rank), name="cai-serve-worker", daemon=True
            )
            process.start()
            self._processes.append(process)
        for connection in (server, *(pulse for _, pulse in pulses), *(end for pair in pairs for end in pair)):
            connection.close()

    def wait(self) -> Ready:
        """Wait until the model can be asked.

        Raises:
            ConfigError: the model cannot be served.
            RuntimeError: a process has died.
        """
        while True:
            for connection in wait([self._connection, *self._pulses]):
                message = self._heard(connection)
                if isinstance(message, Ready):
                    return message
                if isinstance(message, Failed):
                    raise self._error(message)

    def listen(self, deliver: Callable[[Step | Refused], None], on_end: Callable[[str], None]) -> None:
        """Hand on what the first rank says from now on, and the reason where a rank has ended by itself; in threads."""
        threading.Thread(target=self._read, args=(deliver, on_end), name="worker-reader", daemon=True).start()
        threading.Thread(target=self._watch, args=(on_end,), name="worker-watcher", daemon=True).start()

    def send(self, order: Order) -> bool:
        """Send an order to the first rank; return whether it still hears any."""
        try:
            self._connection.send(order)
        except (OSError, ValueError):
            return False
        return True

    def stop(self) -> None:
        """End all of them; at once where one has ended already."""
        is_failed = self._ended.is_set()
        self._ended.set()
        for connection in (self._connection, *self._pulses):
            with contextlib.suppress(OSError):
                connection.close()
        deadline = time.monotonic() + (0 if is_failed else STOP_SECONDS)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            if process.is_alive():
                process.kill()
                process.join(STOP_SECONDS)

    def _heard(self, connection: Connection) -> object:
        """Return what a rank says, or that it is dead."""
        try:
            return connection.recv()
        except (EOFError, OSError, TypeError):  # TypeError: closed by `stop` in the midst of a read
            rank = 0 if connection is self._connection else self._pulses.index(connection)
            with contextlib.suppress(AssertionError):  # it is joined by another thread
                self._processes[rank].join(REASON_SECONDS)
            return Failed(f"{self._name(rank)} died with exit code {self._processes[rank].exitcode}", False)

    def _error(self, message: Failed) -> Exception:
        """Return the error for ranks that end at the start: that of what was to be served, if one of them says so."""
        deadline = time.monotonic() + REASON_SECONDS
        connections = [self._connection, *self._pulses]
        while not message.is_user_error and connections and time.monotonic() < deadline:
            for connection in wait(connections, REASON_SECONDS):
                heard = self._heard(connection)
                if isinstance(heard, Failed):
                    connections.remove(connection)
                    message = heard if heard.is_user_error else message
        if message.is_user_error:
            return ConfigError(message.message)
        return RuntimeError(f"a model cannot be opened: {message.message}")

    def _name(self, rank: int) -> str:
        if self._options.ranks == 1:
            return "the process of a model"
        return f"rank {rank} of {self._options.ranks} of a model"

    def _read(self, deliver: Callable[[Step | Refused], None], on_end: Callable[[str], None]) -> None:
        while not self._ended.is_set():
            message = self._heard(self._connection)
            if isinstance(message, Failed):
                self._end(message.message, on_end)
                return
            deliver(message)  # type: ignore[arg-type]  # nothing else comes

    def _watch(self, on_end: Callable[[str], None]) -> None:
        """Look at the pulses of all ranks, by ticks of this thread: there are none while the server stands still."""
        silent = dict.fromkeys(self._pulses, 0)
        ticked = time.monotonic()
        while not self._ended.is_set():
            try:
                speaking = wait(self._pulses, TICK_SECONDS)
            except (OSError, ValueError):  # closed by `stop`
                return
            for pulse in speaking:
                message = self._heard(pulse)
                if isinstance(message, Failed):
                    self._end(message.message, on_end)
                    return
                silent[pulse] = 0
                if isinstance(message, float) and message > self._step_seconds:
                    name = self._name(self._pulses.index(pulse))
                    self._end(f"{name} has computed a step for {message:g} seconds", on_end)
                    return
            if time.monotonic() - ticked >= TICK_SECONDS:
                ticked = time.monotonic()
                silent = {pulse: count + 1 for pulse, count in silent.items()}
            for rank, pulse in enumerate(self._pulses):
                if silent[pulse] * TICK_SECONDS > SILENT_SECONDS:
                    self._end(f"{self._name(rank)} is stuck: it says nothing", on_end)
                    return

    def _end(self, reason: str, on_end: Callable[[str], None]) -> None:
        """End all ranks where one has ended: others would wait for it, or say that they miss it."""
        if not self._ended.is_set():
            self._ended.set()
            for process in self._processes:
                process.kill()
            on_end(reason)
