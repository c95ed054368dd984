"""A tracker's thread. The loop hands over what is to be written and never waits; what fails is told in a line."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from cai_apps.run.health.late_ranks import OWN
from cai_apps.run.trackers.writer import Identity, Writer

WAITING = 10_000
"""Calls that wait for a tracker at most; more are left out."""
FAILURES = 3
"""Failures in a row after which a tracker is dropped."""
PAUSE = 5.0
"""Seconds between two attempts to start."""


def _say(line: str) -> None:
    print(line, flush=True)


class Lane:
    """Runs a writer in a thread of its own.

    A start that fails is tried again; a write that fails is left out, as nobody knows how much of it was taken.
    Several failures in a row drop the tracker.

    Args:
        name: the tracker's name, for lines.
        writer: the tracker's writer.
        say: prints a line.
        pause: seconds between two attempts to start.
    """

    def __init__(
        self, name: str, writer: Writer, *, say: Callable[[str], None] = _say, pause: float = PAUSE
    ) -> None:
        self._name, self._writer, self._say, self._pause = name, writer, say, pause
        self._calls: deque[tuple[str, Callable[[], None]]] = deque()
        self._changed = threading.Condition()
        self._closed, self._full = threading.Event(), False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name=f"{OWN}tracker {name}", daemon=True)

    def start(self, config: Mapping[str, Any], identity: Identity) -> None:
        """Start the writer, and the thread that does so."""
        self._first: Callable[[], None] = lambda: self._writer.start(config, identity)
        self._thread.start()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Have numbers of a step written."""
        self._put(f"numbers of step {step}", lambda: self._writer.scalars(step, values))

    def text(self, step: int, name: str, text: str) -> None:
        """Have a text of a step written."""
        self._put(f"{name} of step {step}", lambda: self._writer.text(step, name, text))

    def end(self) -> None:
        """Let the writer finish once it has written what waits."""
        with self._changed:
            self._closed.set()
            self._changed.notify()

    def close(self, seconds: float) -> None:
        """Let the writer finish, and wait for it so many seconds at most."""
        self.end()
        self._thread.join(seconds)
        if self._thread.is_alive():
            self._say(
                f"tracker {self._name}: not finished after {seconds:.0f} s and left so; metrics.jsonl has all numbers"
            )

    def _put(self, what: str, call: Callable[[], None]) -> None:
        if not self._thread.is_alive():
            return
        with self._changed:
            full = len(self._calls) >= WAITING
            if not full:
                self._calls.append((what, call))
            self._changed.notify()
        if full and not self._full:
            self._say(f"tracker {self._name}: does not keep up; {what} and more are left out")
        self._full = full

    def _run(self) -> None:
        while not self._attempt("start", self._first):
            if self._is_dropped():
                return
            self._closed.wait(self._pause)
        while (following := self._take()) is not None:
            self._attempt(*following)
            if self._is_dropped():
                return
        self._attempt("finish", self._writer.finish)

    def _take(self) -> tuple[str, Callable[[], None]] | None:
        """Return the next call; None: there is none any more."""
        with self._changed:
            while not self._calls:
                if self._closed.is_set():
                    return None
                self._changed.wait()
            return self._calls.popleft()

    def _attempt(self, what: str, call: Callable[[], None]) -> bool:
        """Return whether a call went well; tell of the first of several failures in a row."""
        try:
            call()
        except Exception as error:  # whatever the code of a tracker meets: the run goes on
            self._failures += 1
            if self._failures == 1:
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                cause = f"{type(error).__name__}: {lines[0][:200] if lines else ''}"
                self._say(f"tracker {self._name}: {what} failed, the run goes on ({cause})")
            return False
        self._failures = 0
        return True

    def _is_dropped(self) -> bool:
        if self._failures < FAILURES:
            return False
        self._say(f"tracker {self._name}: dropped after {FAILURES} failures; metrics.jsonl has all numbers")
        return True
