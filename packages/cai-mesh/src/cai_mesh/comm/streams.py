"""Work beside compute: collectives and copies on a stream of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch


class SideStream:
    """A stream of its own on a GPU; elsewhere work runs in place.

    Memory is not tied to the stream: whoever issues work keeps its tensors until a mark after it was waited for, or
    calls `keep`. Waiting bounds what is in flight, which leaving it to the allocator would not.

    `after_compute`, `wait_for_compute` and `join` mean the current stream of the device by compute: call them outside
    `work`.

    Args:
        device: the stream's device.
        priority: the priority of a CUDA stream: a lower number is served first.

    Attributes:
        stream: the CUDA stream; None where the device has none.
    """

    def __init__(self, device: torch.device, *, priority: int = 0):
        self.stream = torch.cuda.Stream(device, priority) if device.type == "cuda" else None

    @contextlib.contextmanager
    def work(self, after: torch.cuda.Event | None = None) -> Iterator[None]:
        """Work issued inside goes to the stream, and runs once `after`, an event of another stream, is past."""
        if self.stream is None:
            yield
            return
        with torch.cuda.stream(self.stream):
            if after is not None:
                self.stream.wait_event(after)
            yield

    @contextlib.contextmanager
    def after_compute(self) -> Iterator[None]:
        """`work` that runs once what the compute stream has been given so far is done."""
        self.wait_for_compute()
        with self.work():
            yield

    def wait_for_compute(self) -> None:
        """Let what is issued from now on wait for what the compute stream has been given so far."""
        if self.stream is not None:
            self.stream.wait_stream(torch.cuda.current_stream(self.stream.device))

    def mark(self) -> Mark:
        """A handle on everything issued so far."""
        return Mark(self.stream)

    def join(self) -> None:
        """Let the compute stream wait for everything issued."""
        self.mark().wait()

    def keep(self, tensor: torch.Tensor) -> None:
        """Let the memory of a tensor not be used again before everything issued so far is done, whoever lets it go."""
        if self.stream is not None:
            tensor.record_stream(self.stream)


class Mark:
    """A point in a stream; a `CommHandle`.

    Args:
        stream: the stream that it marks the end of, as issued so far; None: nothing is waited for.

    Attributes:
        event: the event at that point, for a host that waits; None without a stream.
    """

    def __init__(self, stream: torch.cuda.Stream | None):
        self._device = None if stream is None else stream.device
        self.event = None if stream is None else stream.record_event()

    def wait(self) -> None:
        """Let the compute stream wait for it."""
        if self.event is not None:
            torch.cuda.current_stream(self._device).wait_event(self.event)
