"""Streamed state: it lives on the host and is stepped on the device, to which it goes in pieces and comes back.

The host steps some chunks. At the same time master weights, optimizer state and gradients of others cross the link, in
both directions at once: 28 bytes a parameter, as many as a host step moves. The device's arithmetic takes next to no
time (interleaved updates: Deep Optimizer States, Maurya et al., arXiv:2410.21316). Host memory has the bandwidth for
both: about twice what a few cores use of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import torch

from cai_gemini.chunk.chunk import OffloadedChunk, Taken
from cai_gemini.chunk.optimizer_step import has_two_moments
from cai_gemini.memory.copies import FIRST, Copied, Copies, Scalar
from cai_gemini.memory.ledger import Ledger
from cai_gemini.memory.pinned import in_host_memory
from cai_gemini.memory.worker import Worker
from cai_gemini.planning.policy import StepPlace
from cai_gemini.steps.pieces import PIECE, SLOTS, Piece, Slot, pieces
from cai_mesh.comm import SideStream
from cai_mesh.errors import PlanError

AHEAD = 6  # pieces queued


def check_streamed(fraction: float, optimizer: torch.optim.Optimizer) -> None:
    """Raise `PlanError` where a fraction of the state is to be streamed and the optimizer's cannot be."""
    if fraction and not has_two_moments(optimizer):
        raise PlanError(
            "state of this optimizer is not stepped on the device in pieces",
            got=f"streamed={fraction} with {type(optimizer).__name__}",
            expected="torch.optim.Adam or AdamW, without amsgrad or differentiable",
            fix="leave streamed out: the host steps what does not stay on the device",
        )


def can_stream(chunk: OffloadedChunk) -> bool:
    """Whether a chunk's state in host memory can be stepped on the device."""
    return chunk.step is not None and chunk.step.fused and chunk.disk is None


@torch.no_grad()
def keep_streamed(chunk: OffloadedChunk, device: torch.device) -> None:
    """Stream a chunk's state from now on: move it to page-locked memory, where copies run at full speed."""
    step = chunk.step
    assert step is not None
    chunk.settle()
    chunk.show_writes()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return in_host_memory(tensor, device)

    with torch._C.DisableTorchFunctionSubclass():
        chunk.unit.move_shard(moved(chunk.unit.shard))
        chunk.host_weights.adopt()
        step.move_moments(moved)
    chunk.place = StepPlace.STREAMED


@dataclass(frozen=True)
class _Job:
    """A chunk to be stepped."""

    chunk: OffloadedChunk
    inputs: Taken
    done: Future[None] = field(default_factory=Future)


class StreamedSteps:
    """The `Stepper` of streamed chunks: on the device, one after the other, in a thread of its own.

    A few pieces are queued ahead, so that the link does not wait for this thread. They share the streams of weights and
    gradients: those come between pieces, while copies queued in another stream would keep them waiting to the end.

    Args:
        copies: copies to and from the device.
        ledger: the ledger of the device's memory.
        nbytes: bytes for the pieces, as `buffer_bytes` says.
    """

    def __init__(self, copies: Copies, ledger: Ledger, nbytes: int):
        self._copies, self._worker = copies, Worker("cai_gemini streamed", copies.device, threads=1)
        self._stream = SideStream(copies.device, priority=FIRST)
        ledger.change("state", nbytes)
        memory = [torch.empty(nbytes // SLOTS, dtype=torch.uint8, device=copies.device) for _ in range(SLOTS)]
        free = Copied(copies.mark())  # of what the memory was before
        self._slots = itertools.cycle([Slot(buffer, free) for buffer in memory])

    def step(self, chunks: Sequence[OffloadedChunk], scale: float | Scalar) -> None:
        """Step chunks in order, in the background: each is awaited where it is used."""
        jobs = [_Job(chunk, inputs) for chunk in chunks if (inputs := chunk.take_gradient()) is not None]
        if not jobs:
            return
        for job in jobs:
            if job.chunk.stays:
                job.chunk.arrive()  # no copy that is under way writes after the step
        free = self._copies.mark()
        self._worker.submit(lambda: self._run(jobs, scale, free))
        for job in jobs:
            job.chunk.stepped_by(job.done, updates_device=job.chunk.stays)

    def _run(self, jobs: Sequence[_Job], scale: float | Scalar, free: torch.cuda.Event | None) -> None:
        """free: where the device has read the weights of chunks that stay."""
        queued: deque[tuple[Copied, _Job | None]] = deque()
        try:
            with self._stream.work(free), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                for job in jobs:
                    for sent, last in self._pieces(job, float(scale)):
                        queued.append((sent, job if last else None))
                        if len(queued) > AHEAD:
                            self._await(*queued.popleft())
                while queued:
                    self._await(*queued.popleft())
        except BaseException as error:
            for sent, _ in queued:  # nothing writes any more once a chunk is said to have failed
                with contextlib.suppress(RuntimeError):
                    sent.synchronize()
            for job in jobs:
                if not job.done.done():
                    job.done.set_exception(error)

    def _pieces(self, job: _Job, scale: float) -> Iterator[tuple[Copied, bool]]:
        """Queue a chunk's pieces, one at a time; gives their copies to the host, and whether these are the last."""
        chunk, (gradient, groups, step) = job.chunk, job.inputs
        ready, unit = gradient.settled(), chunk.unit
        chunk.host_weights.wait_until_read()
        chunk.host_weights.refresh()
        tensors = (unit.shard, *step.moments(), ready, chunk.host_weights.tensor)
        weights = unit.weights.data if chunk.stays else None
        chunk_pieces = pieces(step.blocks(groups, unit.shard.numel(), self._copies.device), PIECE)
        if not chunk_pieces:  # the optimizer leaves the chunk's parameters out
            yield Copied(None), True
        for piece in chunk_pieces:
            part = slice(piece.low, piece.high)
            host_tensors = [tensor[part] for tensor in tensors]
            used = weights[part] if weights is not None else None
            yield self._step_piece(job, piece, host_tensors, used, scale), piece is chunk_pieces[-1]

    def _step_piece(
        self,
        job: _Job,
        piece: Piece,
        host_tensors: list[torch.Tensor],
        used: torch.Tensor | None,
        scale: float,
    ) -> Copied:
        """Bring a piece, step it and send it back; returns its copies back.

        Args:
            host_tensors: master weights, both moments, gradient, and the memory of new weights, all on the host.
            used: weights on the device, that get the new ones, where they stay.
        """
        slot, step, name = next(self._slots), job.inputs[2], job.chunk.name
        views = slot.views(host_tensors)
        arriving = views.gradient if views.coming is None else views.coming
        self._copies.all_to_device([*views.state, arriving], host_tensors[:4], slot.sent.event, name).wait()
        if views.coming is not None:
            views.gradient.copy_(views.coming)
        if scale != 1.0:
            views.gradient.mul_(scale)
        for block in piece.blocks:
            part = slice(block.low - piece.low, block.high - piece.low)
            master, first, second = (tensor[part] for tensor in views.state)
            step.adam(block, master, views.gradient[part], first, second)
        views.leaving.copy_(views.state[0])
        if used is not None:
            used.copy_(views.leaving)
        slot.sent = self._copies.all_to_host(
            [*host_tensors[:3], host_tensors[4]], [*views.state, views.leaving], name
        )
        return slot.sent

    def _await(self, sent: Copied, over: _Job | None) -> None:
        """Wait for a piece, and finish the chunk that is over with it.

        over: the chunk whose pieces have all been sent then.
        """
        sent.synchronize()
        if over is not None:
            over.chunk.host_weights.adopt()
            self._copies.host.give(over.inputs[0].tensor)
            over.done.set_result(None)
