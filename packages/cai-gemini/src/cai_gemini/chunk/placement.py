"""The placement of an offloaded model between uses, counted from its chunks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.planning.policy import StepPlace


@dataclass(frozen=True)
class Placement:
    """The memory in which the chunks of a model live between their uses.

    Args:
        planned: whether that was planned from traced steps; before, as little as possible is on the device.
        chunks: the number of chunks.
        weights_stay: the number whose weights stay on the device.
        state_chunks: the number that are trained and so have optimizer state.
        state_stays, state_on_disk: the number whose master weights and optimizer state are on the device, on the disk.
        state_streamed: the number whose state is on the host and stepped on the device.
        device_bytes: bytes of weights, gradients and state that stay on the device.
        host_bytes: bytes of the weights that copies to the device are made from, and gradients and state that live on
            the host.
        disk_bytes: bytes of weights and state on the disk.
    """

    planned: bool
    chunks: int
    weights_stay: int
    state_chunks: int
    state_stays: int
    state_on_disk: int
    device_bytes: int
    host_bytes: int
    disk_bytes: int
    state_streamed: int = 0

    @classmethod
    def of(cls, chunks: Sequence[OffloadedChunk], *, planned: bool) -> Placement:
        """Count the chunks of one model."""
        trained = [chunk for chunk in chunks if chunk.step is not None]
        places = [chunk.place for chunk in trained]
        device = host = disk = 0
        for chunk in chunks:
            sizes = chunk.sizes
            on_disk = chunk.host_weights.disk
            host += sizes.weights if on_disk is None else 0
            disk += sizes.weights if on_disk is not None and on_disk.own is not None else 0
            device += sizes.weights if chunk.stays else 0
            if chunk.step is None:
                master = chunk.unit.shard.numel() * chunk.unit.shard.element_size()
                host += 0 if chunk.disk is not None else master
                disk += master if chunk.disk is not None else 0
            elif chunk.place is StepPlace.DEVICE:
                device += sizes.state + sizes.gradients
            else:
                host += sizes.gradients + (0 if chunk.disk is not None else sizes.state)
                disk += sizes.state if chunk.disk is not None else 0
        return cls(
            planned=planned,
            chunks=len(chunks),
            weights_stay=sum(chunk.stays for chunk in chunks),
            state_chunks=len(trained),
            state_stays=places.count(StepPlace.DEVICE),
            state_on_disk=places.count(StepPlace.DISK),
            device_bytes=device,
            host_bytes=host,
            disk_bytes=disk,
            state_streamed=places.count(StepPlace.STREAMED),
        )

    def __str__(self) -> str:
        parts = [f"weights of {self.weights_stay} of {self.chunks} chunks stay on the device"]
        if self.state_chunks:
            parts.append(f"state of {self.state_stays} of {self.state_chunks}")
        if self.state_streamed:
            parts.append(f"{self.state_streamed} come there in pieces to be stepped")
        if self.state_on_disk:
            parts.append(f"{self.state_on_disk} on the disk")
        bytes_of = (
            f"{self.device_bytes / 1e9:.3g} GB on the device, {self.host_bytes / 1e9:.3g} GB on the host"
        )
        return (
            ", ".join(parts)
            + f": {bytes_of}"
            + (f", {self.disk_bytes / 1e9:.3g} GB on the disk" if self.disk_bytes else "")
        )
