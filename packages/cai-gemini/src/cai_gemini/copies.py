"""Copies between host and device on streams of their own; on a CPU device they are done at once."""

from __future__ import annotations

import torch

from cai_gemini.pinned import HostPool
from cai_gemini.timeline import Recorder


class Copied:
    """A copy under way."""

    def __init__(self, event: torch.cuda.Event | None):
        self._event = event

    def wait(self) -> None:
        """Let the current stream wait for it."""
        if self._event is not None:
            torch.cuda.current_stream().wait_event(self._event)

    def synchronize(self) -> None:
        """Wait on the host."""
        if self._event is not None:
            self._event.synchronize()

    @property
    def done(self) -> bool:
        return self._event is None or self._event.query()


class Copies:
    """Both directions of the link of one device.

    Args:
        device: a CUDA device, or the CPU, which then plays the device.

    Attributes:
        host: host memory to copy from and to.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.recorder: Recorder | None = None
        self.host = HostPool(device)
        self._up = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._down = torch.cuda.Stream(device) if device.type == "cuda" else None

    def mark(self) -> torch.cuda.Event | None:
        """Where the compute stream is now."""
        if self._up is None:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def to_device(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        after: torch.cuda.Event | None,
        *,
        held: bool = False,
        name: str = "activations",
    ) -> Copied:
        """Copy pinned host memory to the device, once the compute stream has passed `after`.

        held: the caller keeps the device tensor until the compute stream has waited for the copy.
        name: of what is copied, on a timeline.
        """
        return self._copy((self._up, "to_device"), target, source, after, held, name)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, *, held: bool = False, name: str = "activations"
    ) -> Copied:
        """Copy a device tensor to pinned host memory, after what has been queued so far; otherwise as `to_device`."""
        return self._copy((self._down, "to_host"), target, source, self.mark(), held, name)

    def _copy(
        self,
        lane: tuple[torch.cuda.Stream | None, str],
        target: torch.Tensor,
        source: torch.Tensor,
        after: torch.cuda.Event | None,
        held: bool,
        name: str,
    ) -> Copied:
        stream, recorder = lane[0], self.recorder
        with torch.cuda.stream(stream):
            if stream is not None and after is not None:
                stream.wait_event(after)
            begin = recorder.now(stream) if recorder is not None else None
            target.copy_(source, non_blocking=stream is not None)
            if recorder is not None and begin is not None:
                recorder.span(lane[1], begin, recorder.now(stream), name)
            if stream is None:
                return Copied(None)
            for tensor in (target, source):
                if tensor.is_cuda and not held:
                    tensor.record_stream(stream)
            return Copied(stream.record_event())
