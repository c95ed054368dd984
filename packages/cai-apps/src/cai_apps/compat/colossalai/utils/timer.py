"""Watches that wait for the device."""

from __future__ import annotations

import time

from cai_apps.compat.colossalai.accelerator import get_accelerator

__all__ = ["MultiTimer", "Timer"]


class Timer:
    """A watch; it waits for the device when it is read."""

    def __init__(self) -> None:
        self._start, self._elapsed, self._history = time.time(), 0.0, list[float]()

    @property
    def has_history(self) -> bool:
        """Whether an interval was kept."""
        return bool(self._history)

    @property
    def current_time(self) -> float:
        """The time in seconds."""
        get_accelerator().synchronize()
        return time.time()

    def start(self) -> None:
        """Begin an interval."""
        self._elapsed, self._start = 0.0, self.current_time

    def lap(self) -> float:
        """Return the seconds since the beginning."""
        return self.current_time - self._start

    def stop(self, keep_in_history: bool = False) -> float:
        """End the interval; return its seconds."""
        self._elapsed = self.lap()
        if keep_in_history:
            self._history.append(self._elapsed)
        return self._elapsed

    def get_history_mean(self) -> float:
        """Return the mean of the intervals that were kept."""
        return sum(self._history) / len(self._history)

    def get_history_sum(self) -> float:
        """Return the sum of the intervals that were kept."""
        return sum(self._history)

    def get_elapsed_time(self) -> float:
        """Return the last interval."""
        return self._elapsed

    def reset(self) -> None:
        """Forget all intervals."""
        self._elapsed, self._history = 0.0, []


class MultiTimer:
    """Watches by name.

    Args:
        on: whether they run.
    """

    def __init__(self, on: bool = True):
        self._on, self._timers = on, dict[str, Timer]()

    def start(self, name: str) -> None:
        """Begin an interval of a watch."""
        if self._on:
            self._timers.setdefault(name, Timer()).start()

    def stop(self, name: str, keep_in_history: bool = False) -> float | None:
        """End an interval of a watch; return its seconds."""
        return self._timers[name].stop(keep_in_history) if self._on else None

    def get_timer(self, name: str) -> Timer:
        """Return the watch of a name."""
        return self._timers[name]

    def reset(self, name: str | None = None) -> None:
        """Forget the intervals of a watch; None: of all."""
        for key, timer in self._timers.items():
            if name in (None, key):
                timer.reset()

    def is_on(self) -> bool:
        """Return whether the watches run."""
        return self._on

    def set_status(self, mode: bool) -> None:
        """Let the watches run or not."""
        self._on = mode

    def __iter__(self):
        return iter(self._timers.items())
