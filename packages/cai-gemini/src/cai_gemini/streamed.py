"""Steps that the device takes with state that lives on the host, which comes in pieces and goes back.

While the host steps some chunks, master weights, optimizer state and gradients of others cross the link in both
directions at once, 28 bytes a parameter as the host's step moves, and the device's arithmetic takes next to no time
(interleaved updates: Deep Optimizer States, Maurya et al., arXiv:2410.21316). Host memory does both, with a rate of
about twice what a few cores make of it.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cai_gemini.chunk_step import AdamBlock, ChunkStep, has_two_moments
from cai_gemini.copies import Copied, Copies, Scalar
from cai_gemini.gradient import wide
from cai_gemini.pinned import in_host_memory
from cai_gemini.states import Ledger
from cai_gemini.worker import Worker
from cai_mesh.errors import PlanError

if TYPE_CHECKING:
    from cai_gemini.held import Held, Taken

PIECE = 2**22  # elements: copies of 16 MB run at the link's rate, and are launched in a quarter of their time
SLOTS = 3  # one on its way here, one there, one stepped
ALIGNMENT = 256  # bytes


def check_streamed(wanted: float, optimizer: torch.optim.Optimizer, *, delay: bool) -> None:
    """Raise `PlanError` where state cannot be stepped on the device piece by piece as asked."""
    if wanted and not has_two_moments(optimizer):
        raise PlanError(
            "state of this optimizer is not stepped on the device in pieces",
            got=f"streamed={wanted} with {type(optimizer).__name__}",
            expected="torch.optim.Adam or AdamW, without amsgrad or differentiable",
            fix="leave streamed out: the host steps what does not stay on the device",
        )
    if wanted and delay:
        raise PlanError(
            "steps that the device takes are not delayed",
            got=f"streamed={wanted}, delay=True",
            fix="leave out one of them",
        )


def can_stream(held: Held) -> bool:
    """Whether a chunk's state in host memory can be stepped on the device."""
    return held.step is not None and held.step.fused and held.disk is None


def buffer_bytes(helds: Sequence[Held]) -> int:
    """What the device needs for pieces of any of the chunks."""
    return SLOTS * max((_slot_bytes(held) for held in helds), default=0)


def _slot_bytes(held: Held) -> int:
    """Of a piece: three of state, the gradient as it comes (new weights after it), and as wide as the state."""
    assert held.gradient_dtype is not None
    unit = held.unit
    coming = max(wide(held.gradient_dtype).itemsize, unit.whole.element_size())
    numel = min(PIECE, unit.shard.numel())
    return 4 * _aligned(numel * unit.shard.element_size()) + _aligned(numel * coming)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@torch.no_grad()
def keep_streamed(held: Held, device: torch.device) -> None:
    """Let master weights and moments be where copies to and from `device` run at full speed."""
    step = held.step
    assert step is not None
    held.settle()
    held.show_writes()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return in_host_memory(tensor, device)

    with torch._C.DisableTorchFunctionSubclass():
        held.unit.move_shard(moved(held.unit.shard))
        held.home.adopt()
        step.move_moments(moved)
    held.streamed = True


@dataclass(frozen=True)
class Piece:
    """Neighbouring blocks of a chunk, [low, high) of its elements."""

    low: int
    high: int
    blocks: Sequence[AdamBlock]


def pieces(blocks: Sequence[AdamBlock], most: int) -> list[Piece]:
    """Blocks of a chunk, none larger than `most` elements, in as many pieces as it takes."""
    found: list[Piece] = []
    for block in sorted(blocks, key=lambda b: b.low):
        if found and block.high - found[-1].low <= most:
            found[-1] = Piece(found[-1].low, block.high, (*found[-1].blocks, block))
        else:
            found.append(Piece(block.low, block.high, (block,)))
    return found


class Streaming:
    """Steps chunks on the device, one after the other, in a thread of its own.

    Args:
        copies: to and from the device.
        ledger: of its memory.
        nbytes: of `buffer_bytes`.
    """

    def __init__(self, copies: Copies, ledger: Ledger, nbytes: int):
        self._copies, self._worker = copies, Worker("cai_gemini streamed", copies.device)
        self._stream = torch.cuda.Stream(copies.device) if copies.device.type == "cuda" else None
        ledger.change("state", nbytes)
        self._slots = itertools.cycle(
            [torch.empty(nbytes // SLOTS, dtype=torch.uint8, device=copies.device) for _ in range(SLOTS)]
        )
        self._under_way: deque[tuple[Copied, Callable[[], None] | None]] = deque()

    def step(self, helds: Sequence[Held], scale: float | Scalar) -> None:
        """Step chunks in order, in the background: each is awaited where it is used."""
        taken = [(held, found) for held in helds if (found := held.take_gradient()) is not None]
        done: list[Future[None]] = [Future() for _ in taken]

        def run() -> None:
            try:
                with self._on_stream():
                    for (held, what), future in zip(taken, done, strict=True):
                        self._step(held, what, float(scale), future)
                    while self._under_way:
                        self._await_one()
            except BaseException as error:
                self._give_up()
                for future in done:
                    if not future.done():
                        future.set_exception(error)

        for held, _ in taken:
            held.finish_step()
        if taken:
            self._worker.submit(run)
        for (held, _), future in zip(taken, done, strict=True):
            held.stepped_by(future)

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        with torch.cuda.stream(self._stream), torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            yield

    def _step(self, held: Held, taken: Taken, scale: float, done: Future[None]) -> None:
        gradient, groups, step = taken
        ready = gradient.settled()
        held.home.wait_until_read()
        held.home.refresh()
        tensors = (held.unit.shard, *step.moments(), ready, held.home.weights)
        of = pieces(step.blocks(groups, PIECE, self._copies.device), PIECE)

        def over() -> None:
            held.home.adopt()
            self._copies.host.give(ready)
            done.set_result(None)

        for piece in of:
            if len(self._under_way) == SLOTS:
                self._await_one()
            here = [tensor[piece.low : piece.high] for tensor in tensors]
            sent = self._step_piece(step, piece, here, scale, held.name)
            self._under_way.append((sent, over if piece is of[-1] else None))

    def _step_piece(
        self, step: ChunkStep, piece: Piece, here: Sequence[torch.Tensor], scale: float, name: str
    ) -> Copied:
        """Bring a piece, step it and send it back; returns its copies back.

        Args:
            here: on the host, master weights, both moments, gradient, and where new weights go.
        """
        *state, grad, coming, leaving = _views(next(self._slots), here)
        arriving = grad if coming.dtype == grad.dtype else coming
        there = (*state, arriving)
        self._copies.all_to_device(list(zip(there, here[:4], strict=True)), None, name).wait()
        if arriving is not grad:
            grad.copy_(arriving)
        if scale != 1.0:
            grad.mul_(scale)
        master, first, second = state
        for block in piece.blocks:
            at = slice(block.low - piece.low, block.high - piece.low)
            step.adam(block, master[at], grad[at], first[at], second[at])
        leaving.copy_(master)
        back = zip((*here[:3], here[4]), (*state, leaving), strict=True)
        return self._copies.all_to_host(list(back), name)

    def _await_one(self) -> None:
        sent, over = self._under_way.popleft()
        sent.synchronize()
        if over is not None:
            over()

    def _give_up(self) -> None:
        """Let nothing of what is under way write any more."""
        for sent, _ in self._under_way:
            with contextlib.suppress(RuntimeError):
                sent.synchronize()
        self._under_way.clear()


def _views(slot: torch.Tensor, here: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors in a slot: master weights, both moments and the gradient in their dtype; over one another, the gradient
    in that of the host's and the new weights, which are made when it has been read."""
    master, *_, gradient, weights = here
    size = _aligned(master.numel() * master.element_size())
    dtypes = [master.dtype] * 4 + [gradient.dtype, weights.dtype]
    at = [0, size, 2 * size, 3 * size, 4 * size, 4 * size]
    return [
        slot[low : low + master.numel() * dtype.itemsize].view(dtype)
        for low, dtype in zip(at, dtypes, strict=True)
    ]
