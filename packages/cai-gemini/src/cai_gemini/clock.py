"""What a pass took and held: seconds of compute and bytes beside the chunks, use by use."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cai_gemini.states import Ledger


class Clock:
    """Watches uses on one device.

    Args:
        device: whose compute stream is timed.
        ledger: of the bytes that chunks hold there.
        observe: bytes in use on the device at most since the last call; default: of torch's allocator on CUDA, and
            what the ledger has on a CPU, where nothing else is counted.
    """

    def __init__(self, device: torch.device, ledger: Ledger, observe: Callable[[], int] | None):
        self._device, self._ledger = device, ledger
        self._observe = observe or (self._allocated if device.type == "cuda" else None)
        self._spans: list[list] = []

    def _allocated(self) -> int:
        most = torch.cuda.max_memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        return most

    def start(self) -> None:
        """A use begins to compute."""
        self._spans.append([self._now(), None])

    def stop(self) -> None:
        """The use under way has computed."""
        if self._spans and self._spans[-1][1] is None:
            self._spans[-1][1] = self._now()

    def beside(self) -> int:
        """Bytes beside the chunks, at most, since the last call."""
        chunks = self._ledger.since()
        return 0 if self._observe is None else max(self._observe() - chunks, 0)

    def seconds(self) -> list[float]:
        """Of every use so far, and forget them. Waits for the device."""
        spans, self._spans = self._spans, []
        if not spans:
            return []
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return [0.0 if end is None else begin.elapsed_time(end) / 1e3 for begin, end in spans]
        return [0.0 if end is None else end - begin for begin, end in spans]

    def _now(self):
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
