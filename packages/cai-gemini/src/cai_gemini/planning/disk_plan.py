"""Computes a model's host memory and the chunks that go to a disk, before anything is moved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from cai_gemini.planning.budget import Units, kinds
from cai_mesh.errors import PlanError
from cai_mesh.layout import FlatChunk
from cai_mesh.sizes import parse_bytes

PAGE = 4096
STEPPED = 2  # chunks in memory while state on a disk is stepped
BUFFERS = 2  # chunks between disk and device at once


@dataclass(frozen=True)
class ChunkBytes:
    """Bytes of one chunk's parts.

    Args:
        numel: elements, padding included.
        master: bytes of its master weights.
        state: bytes of the optimizer's state; 0 for a frozen chunk.
        weights: bytes in the dtype of computation.
        trains: whether it has gradients, of the dtype of computation, and state.
        shared: whether the master weights on a disk serve as weights too.
        gradient: bytes of its gradient as it comes back; None: as many as `weights`.
    """

    numel: int
    master: int
    state: int
    weights: int
    trains: bool
    shared: bool
    gradient: int | None = None

    @property
    def weights_on_disk(self) -> int:
        """Bytes on a disk beside those of master weights."""
        return 0 if self.shared else self.weights


@dataclass(frozen=True)
class OnDisk:
    """Chunks that use a disk.

    Args:
        state: those whose master weights and optimizer state live there.
        weights: those of them, and frozen ones, whose weights to copy to the device live there as well.
    """

    state: frozenset[int] = frozenset()
    weights: frozenset[int] = frozenset()

    @property
    def every(self) -> frozenset[int]:
        """All of them."""
        return self.state | self.weights


def chunk_bytes(
    found: Units, compute: torch.dtype | None, optimizer: torch.optim.Optimizer
) -> list[ChunkBytes]:
    """The bytes of every chunk, in the order of units and their kinds."""
    tensors = state_tensors(optimizer)

    def one(members: Sequence[tuple[str, torch.nn.Parameter]]) -> ChunkBytes:
        numel, param = FlatChunk(members).numel, members[0][1]
        dtype = compute or param.dtype
        master, trains = numel * param.element_size(), param.requires_grad
        state = tensors * master if trains else 0
        return ChunkBytes(numel, master, state, numel * dtype.itemsize, trains, dtype == param.dtype)

    return [one(members) for params in found.values() for members in kinds(params)]


def state_tensors(optimizer: torch.optim.Optimizer) -> int:
    """Tensors a parameter that an optimizer of torch is known to keep; 1 for others."""
    options = optimizer.defaults
    if "betas" in options:
        return 2 + bool(options.get("amsgrad"))
    return 1 + bool(options.get("centered")) + bool(options.get("momentum") and "alpha" in options)


def host_bytes(chunks: Sequence[ChunkBytes], disk: OnDisk) -> int:
    """The most host memory that chunks take between steps and in one, with one backward a step."""
    total = 0
    for i, chunk in enumerate(chunks):
        gradient = chunk.weights if chunk.gradient is None else chunk.gradient
        total += gradient if chunk.trains else 0
        total += 0 if i in disk.every else chunk.master + chunk.state
        total += 0 if i in disk.weights else chunk.weights
    stepped = [_step_bytes(chunks[i], i in disk.weights) for i in disk.state]
    staged = [chunks[i].weights for i in disk.weights]
    return total + STEPPED * max(stepped, default=0) + BUFFERS * max(staged, default=0)


def _step_bytes(chunk: ChunkBytes, weights: bool) -> int:
    """Bytes of what a step reads and writes, with every tensor on pages of its own."""
    tensors = 1 + chunk.state // chunk.master
    return tensors * _pages(chunk.master) + (_pages(chunk.weights_on_disk) if weights else 0)


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def disk_bytes(chunks: Sequence[ChunkBytes], disk: OnDisk) -> int:
    """Return the bytes that the chunks take of the disk."""
    return sum(chunks[i].master + chunks[i].state for i in disk.every) + sum(
        chunks[i].weights_on_disk for i in disk.weights
    )


def last(
    chunks: Sequence[ChunkBytes], fraction: float, which: Callable[[ChunkBytes], bool]
) -> frozenset[int]:
    """Return the chunks used last, of those that are `which`, with `fraction` of all elements or a little more."""
    of = [i for i, chunk in enumerate(chunks) if which(chunk)]
    elements, total, chosen = fraction * sum(chunks[i].numel for i in of), 0, []
    for i in reversed(of):
        if total >= elements:
            break
        chosen.append(i)
        total += chunks[i].numel
    return frozenset(chosen)


def choose(
    chunks: Sequence[ChunkBytes],
    state: float,
    weights: float,
    host_memory: int | str | None,
    *,
    disk: bool,
) -> OnDisk:
    """Choose the chunks on the disk: as asked by fractions, and more where host memory would not do, state first.

    Raises `PlanError` where that is not possible, with what host memory would do.
    """
    if (state or weights) and not disk:
        raise PlanError("no directory for state on the disk", fix="pass nvme='/path/on/a/disk'")
    also = last(chunks, weights, lambda chunk: True)
    state_chunks = last(chunks, state, lambda chunk: chunk.trains) | {i for i in also if chunks[i].trains}
    least = math.inf
    allowed = math.inf if host_memory is None else parse_bytes(host_memory)
    first = OnDisk(state_chunks, also)
    for on_disk in _more(chunks, first) if disk else [first]:
        needed = host_bytes(chunks, on_disk)
        if needed <= allowed:
            return on_disk
        least = min(least, needed)
    raise PlanError(
        "the host memory is too small for what may have to live there",
        got=host_memory if isinstance(host_memory, str) else f"{host_memory:,} bytes",
        expected=f"{least:,} bytes",
        cause="gradients, and chunks on their way from and to the disk"
        if disk
        else "gradients and weights to copy, master weights and optimizer state",
        fix="raise host_memory, or train in a smaller dtype" + ("" if disk else ", or pass nvme"),
    )


def _more(chunks: Sequence[ChunkBytes], on_disk: OnDisk) -> Iterator[OnDisk]:
    """Yield `on_disk`, then the same with one more chunk after the other on the disk, those used last first."""
    yield on_disk
    for i in reversed(range(len(chunks))):
        if chunks[i].trains and i not in on_disk.state:
            on_disk = OnDisk(on_disk.state | {i}, on_disk.weights)
            yield on_disk
    for i in reversed(range(len(chunks))):
        if i not in on_disk.weights:
            on_disk = OnDisk(on_disk.state, on_disk.weights | {i})
            yield on_disk
