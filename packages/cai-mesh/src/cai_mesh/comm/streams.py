"""Communication beside compute."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from cai_mesh.comm.handles import Done
from cai_mesh.protocols import CommHandle


class SideStream:
    """A stream of its own on a GPU; elsewhere work runs in place.

    Memory is not tied to the stream: whoever issues work keeps its tensors until a mark after it was waited for.
    That bounds what is in flight, which leaving it to the allocator would not.
    """

    def __init__(self, device: torch.device):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """Work issued inside runs once what the compute stream has been given so far is done."""
        if self.stream is None:
            yield
            return
        self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))
        with torch.cuda.stream(self.stream):
            yield

    def mark(self) -> CommHandle:
        """A handle on everything issued so far; `wait` lets the compute stream wait for it."""
        return Done() if self.stream is None else _Mark(self.stream)

    def join(self) -> None:
        """Let the compute stream wait for everything issued."""
        self.mark().wait()


class _Mark:
    """The `CommHandle` of a point in a stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self._stream, self._event = stream, stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream(self._stream.device).wait_event(self._event)
