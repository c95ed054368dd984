"""Measures a pass: seconds of compute and bytes beside the chunks, use by use."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from cai_gemini.memory.ledger import Ledger


class Clock:
    """Watches uses on one device.

    Args:
        device: the device whose compute stream is timed.
        ledger: the bytes that chunks take there.
        observe: bytes in use on the device at most since the last call; default: of torch's allocator on CUDA, and
            what the ledger has on a CPU, where nothing else is counted.
    """

    def __init__(self, device: torch.device, ledger: Ledger, observe: Callable[[], int] | None):
        self._device, self._ledger = device, ledger
        self._observe = observe or (self._allocated if device.type == "cuda" else None)
        self._spans: list[list] = []  # beginnings and ends in turn

    def _allocated(self) -> int:
        # what was freed and waits for a copying stream counts: nobody else can have it
        most = torch.cuda.memory_stats(self._device)["active_bytes.all.peak"]
        torch.cuda.reset_peak_memory_stats(self._device)
        return most

    def start(self) -> None:
        """A use begins to compute."""
        self._spans.append([self._now(), None])

    def stop(self) -> None:
        """The use under way has computed."""
        if self._spans and self._spans[-1][-1] is None:
            self._spans[-1][-1] = self._now()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The host waits meanwhile: should the device run out of work, that is no compute of the use under way."""
        if not self._spans or self._spans[-1][-1] is not None:
            yield
            return
        self.stop()
        yield
        self._spans[-1] += [self._now(), None]

    def beside(self) -> int:
        """Bytes beside the chunks, at most, since the last call."""
        chunks = self._ledger.since()
        return 0 if self._observe is None else max(self._observe() - chunks, 0)

    def seconds(self) -> list[float]:
        """Return the seconds of every use so far, and forget them. Waits for the device."""
        spans, self._spans = self._spans, []
        if not spans:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return [sum(map(self._between, span[::2], span[1::2])) for span in spans]

    def _between(self, begin: Any, end: Any) -> float:
        if end is None:
            return 0.0
        return begin.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - begin

    def _now(self):
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
