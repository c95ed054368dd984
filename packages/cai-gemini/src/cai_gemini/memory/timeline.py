"""The timeline of a step: bytes on the device by kind, and spans of compute, copies and host steps. Off at first.

Times on a CUDA device come from events on the streams that do the work; on the host, from its clock. Both start at the
same moment, at which the device is idle.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from cai_gemini.memory.ledger import Ledger
from cai_gemini.planning.simulation import Lanes
from cai_mesh.errors import DataError
from cai_mesh.files import write_text

LANES = ("compute", "to_device", "to_host", "host", "disk")
Span = tuple[float, float, str]


@dataclass
class Timeline:
    """A stretch of training.

    Args:
        budget: bytes of device memory that may be used; None: no limit.
        times: seconds of every change of memory, increasing.
        memory: bytes by kind, each as long as `times`: weights, gradients, state, and beside (all else).
        lanes: spans (start, end, chunk) in seconds, by lane.
    """

    budget: int | None = None
    times: list[float] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)
    lanes: dict[str, list[Span]] = field(default_factory=dict)

    @property
    def end(self) -> float:
        """The last moment there is."""
        return max((span[1] for spans in self.lanes.values() for span in spans), default=0.0)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON."""
        write_text(Path(path), json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Timeline:
        """Read what `save` wrote. Raises `DataError` for anything else."""
        try:
            read = cls(**json.loads(Path(path).read_text(encoding="utf-8")))
            read.lanes = {
                lane: [(begin, end, name) for begin, end, name in spans] for lane, spans in read.lanes.items()
            }
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise DataError(
                f"{path} is no timeline", cause=str(error), expected="what Timeline.save wrote"
            ) from None
        return read

    @classmethod
    def simulated(cls, lanes: Lanes, chunks: Sequence[str]) -> Timeline:
        """The lanes of a simulated step, with the names of its chunks."""
        named = {
            lane: [(begin, end, chunks[chunk]) for begin, end, chunk in getattr(lanes, lane)]
            for lane in LANES
        }
        return cls(lanes=named)


Moment = float | torch.cuda.Event


class Recorder:
    """Takes down what happens on one device and its host, from now on.

    Args:
        device: the device whose streams are timed.
        ledger: the bytes that chunks take there.
    """

    def __init__(self, device: torch.device, ledger: Ledger):
        self._device, self._ledger = device, ledger
        self._lock = threading.Lock()  # host steps and copies happen in other threads
        self._spans: list[tuple[str, Moment, Moment, str]] = []
        self._points: list[tuple[Moment, dict[str, int]]] = []
        self._using: tuple[Moment, str] | None = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self._start, self._base = time.perf_counter(), self.now()
        self.changed()

    def now(self, stream: torch.cuda.Stream | None = None) -> Moment:
        """This moment in a stream (default: of compute), or on the host of a CPU device."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream or torch.cuda.current_stream(self._device))
        return event

    def changed(self) -> None:
        """The ledger has changed."""
        nbytes = dict(self._ledger.nbytes)
        if self._device.type == "cuda":
            nbytes["beside"] = max(torch.cuda.memory_allocated(self._device) - self._ledger.total, 0)
        self._points.append((self.now(), nbytes))

    def used(self, chunk: str | None) -> None:
        """A chunk's use begins, or (None) the last one ends."""
        now = self.now()
        if self._using is not None:
            self.span("compute", self._using[0], now, self._using[1])
        self._using = (now, chunk) if chunk is not None else None

    def span(self, lane: str, begin: Moment, end: Moment, chunk: str) -> None:
        """Something took from `begin` to `end`. What was under way when the record began is shown from there on."""
        with self._lock:
            self._spans.append((lane, begin, end, chunk))

    @contextlib.contextmanager
    def on_host(self, chunk: str) -> Iterator[None]:
        """A step of the optimizer on the host."""
        begin = time.perf_counter()
        yield
        self.span("host", begin, time.perf_counter(), chunk)

    def _seconds(self, moment: Moment) -> float:
        if isinstance(moment, float):
            return moment - self._start
        assert isinstance(self._base, torch.cuda.Event)
        return self._base.elapsed_time(moment) / 1e3

    def timeline(self, budget: int | None) -> Timeline:
        """All of it. Waits for the device."""
        self.used(None)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        with self._lock:
            spans = [
                (lane, max(self._seconds(a), 0.0), max(self._seconds(b), 0.0), chunk)
                for lane, a, b, chunk in self._spans
            ]
        kinds = dict.fromkeys(kind for _, nbytes in self._points for kind in nbytes)
        return Timeline(
            budget,
            [self._seconds(moment) for moment, _ in self._points],
            {kind: [nbytes.get(kind, 0) for _, nbytes in self._points] for kind in kinds},
            {lane: sorted((a, b, chunk) for at, a, b, chunk in spans if at == lane) for lane in LANES},
        )


def host_span(recorder: Recorder | None, chunk: str) -> contextlib.AbstractContextManager[None]:
    """`recorder.on_host`, or nothing."""
    return contextlib.nullcontext() if recorder is None else recorder.on_host(chunk)
