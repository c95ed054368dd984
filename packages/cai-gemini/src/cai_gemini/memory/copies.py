"""Copies between host and device on streams of their own; on a CPU device they are done at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_gemini.memory.pinned import HostPool, host_memory
from cai_gemini.memory.timeline import Recorder
from cai_mesh.comm import SideStream

Tensors = list[torch.Tensor]
# Priority of streams: a GPU has few queues, and those that streams share can make compute stand behind copies.
FIRST = -1


class Copied:
    """A copy under way.

    Args:
        event: the event behind the copy; None: it is done.
        stream: the stream that copies.
        tensors: the device tensors it reads or writes. They are kept until somebody has waited; where nobody ever does,
            the allocator is told of the stream before they are let go.
    """

    def __init__(
        self,
        event: torch.cuda.Event | None,
        stream: torch.cuda.Stream | None = None,
        tensors: Sequence[torch.Tensor] = (),
    ):
        self.event, self._stream, self._tensors = event, stream, tensors

    def wait(self) -> None:
        """Let the current stream, of the device of the copy, wait for it."""
        if self.event is not None:
            device = None if self._stream is None else self._stream.device
            torch.cuda.current_stream(device).wait_event(self.event)
        self._tensors = ()

    def synchronize(self) -> None:
        """Wait on the host."""
        if self.event is not None:
            self.event.synchronize()
        self._tensors = ()

    @property
    def done(self) -> bool:
        return self.event is None or self.event.query()

    def __del__(self) -> None:
        if self._stream is not None:
            for tensor in self._tensors:
                tensor.record_stream(self._stream)


class Scalar:
    """A number on the device and, as soon as it is known, on the host: `float` waits for it.

    No other work of the device is waited for, and any thread may ask, whatever its current stream is.

    Args:
        device_value: 0-d, on the device.
        host_value: [1] on the host.
        copied: the copy from device to host.
    """

    def __init__(self, device_value: torch.Tensor, host_value: torch.Tensor, copied: Copied):
        self.device_value, self._host_value, self._copied = device_value, host_value, copied

    def __float__(self) -> float:
        self._copied.synchronize()
        return float(self._host_value[0])


def there(value: float | Scalar) -> float | torch.Tensor:
    """A number as work on the device takes it."""
    return value.device_value if isinstance(value, Scalar) else value


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
        self._up, self._down = SideStream(device, priority=FIRST), SideStream(device, priority=FIRST)

    def mark(self) -> torch.cuda.Event | None:
        """Return a mark of where the compute stream is now."""
        if self.device.type != "cuda":
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
        hold: bool = False,
        name: str = "activations",
    ) -> Copied:
        """Copy pinned host memory to the device, once the compute stream has passed `after`.

        hold: the device memory is not given up before the compute stream has waited for the copy. Otherwise the
            allocator keeps it until all that the copying stream has been given by then is done.
        name: the name of what is copied, on a timeline.
        """
        return self._copy((self._up, "to_device"), [target], [source], after, hold, name)

    def to_host(
        self, target: torch.Tensor, source: torch.Tensor, *, hold: bool = False, name: str = "activations"
    ) -> Copied:
        """Copy a device tensor to pinned host memory, after what has been queued so far; otherwise as `to_device`."""
        return self._copy((self._down, "to_host"), [target], [source], self.mark(), hold, name)

    def all_to_device(
        self, targets: Tensors, sources: Tensors, after: torch.cuda.Event | None, name: str
    ) -> Copied:
        """Several copies at once, to device memory that is not given up, as `to_device`."""
        return self._copy((self._up, "to_device"), targets, sources, after, True, name)

    def all_to_host(self, targets: Tensors, sources: Tensors, name: str) -> Copied:
        """Several copies at once, from device memory that is not given up, as `to_host`."""
        return self._copy((self._down, "to_host"), targets, sources, self.mark(), True, name)

    def scalar(self, value: float | torch.Tensor) -> float | Scalar:
        """A number that other threads may read; a tensor, 0-d, starts on its way to the host."""
        if not isinstance(value, torch.Tensor):
            return value
        if value.device.type == "cpu":
            return Scalar(value, value.reshape(1), Copied(None))
        host_value = host_memory(1, value.dtype, self.device)
        return Scalar(value, host_value, self.to_host(host_value, value.reshape(1), name="scale"))

    def _copy(
        self,
        lane: tuple[SideStream, str],
        targets: Tensors,
        sources: Tensors,
        after: torch.cuda.Event | None,
        hold: bool,
        name: str,
    ) -> Copied:
        stream, recorder = lane[0].stream, self.recorder
        with lane[0].work(after):
            begin = recorder.now(stream) if recorder is not None else None
            torch._foreach_copy_(
                targets, sources, non_blocking=stream is not None
            )  # one call, whatever is copied
            if recorder is not None and begin is not None:
                recorder.span(lane[1], begin, recorder.now(stream), name)
            if stream is None:
                return Copied(None)
            tensors = targets if targets[0].is_cuda else sources
            if not hold:
                for tensor in tensors:
                    lane[0].keep(tensor)
            done = torch.cuda.Event(blocking=True)  # a thread that spins takes a core from host steps
            done.record(stream)
            return Copied(done, stream, tensors if hold else ())
