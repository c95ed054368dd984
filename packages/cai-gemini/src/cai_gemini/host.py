"""The host form of residency: data lives in (pinned) host memory and visits the device."""

from __future__ import annotations

import torch

from cai_mesh.protocols import CommHandle, Done, Stored


class HostResidency:
    """Keeps shards in host memory; a `cai_mesh.protocols.Residency`.

    On a CUDA device the host copies are pinned and `fetch` runs on a side stream. On the CPU device host and device
    are one memory, and nothing is copied.

    Args:
        pin: page-lock host memory. None: where CUDA is available.
    """

    def __init__(self, *, pin: bool | None = None):
        self._pin = torch.cuda.is_available() if pin is None else pin
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, complete on return; the tensor itself when it is there already."""
        if tensor.device.type == "cpu":
            return tensor
        home = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=self._pin)
        home.copy_(tensor)
        return home

    def fetch(self, stored: Stored) -> CommHandle:
        """Start the copy to the device."""
        if stored.on_device is not None:
            return Done()
        stored.on_device = torch.empty_like(stored.home, device=stored.device)
        if stored.device.type != "cuda":
            stored.on_device.copy_(stored.home)
            return Done()
        stream = self._streams.setdefault(stored.device, torch.cuda.Stream(stored.device))
        stream.wait_stream(torch.cuda.current_stream(stored.device))
        with torch.cuda.stream(stream):
            stored.on_device.copy_(stored.home, non_blocking=True)
        stored.on_device.record_stream(stream)
        return _Copy(stream)

    def release(self, stored: Stored) -> None:
        """Drop the device copy; the allocator reuses it once the streams that read it are past."""
        if stored.home.device != stored.device:
            stored.on_device = None

    def evict(self, stored: Stored) -> None:
        """Write the device copy home, wait for it, and drop it."""
        if stored.on_device is not None and stored.on_device is not stored.home:
            stored.home.copy_(stored.on_device)
            stored.on_device = None


class _Copy:
    """The `CommHandle` of a copy on a side stream."""

    def __init__(self, stream: torch.cuda.Stream):
        self._event = stream.record_event()

    def wait(self) -> None:
        torch.cuda.current_stream().wait_event(self._event)
