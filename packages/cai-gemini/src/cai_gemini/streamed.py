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
from typing import TYPE_CHECKING, NamedTuple

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
SLOTS = 4  # one on its way here, one on its way back, and one that each of them goes on with
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
    """Of a piece: three of state, a gradient as wide as it, and the gradient as it comes, with new weights after it."""
    unit, gradient = held.unit, held.gradient_dtype
    assert gradient is not None
    numel, master = min(PIECE, unit.shard.numel()), unit.shard.dtype
    coming = [dtype.itemsize for dtype in (gradient, wide(gradient)) if dtype != master]
    return 4 * _aligned(numel * master.itemsize) + _aligned(numel * max([*coming, unit.whole.element_size()]))


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
            [
                Slot(torch.empty(nbytes // SLOTS, dtype=torch.uint8, device=copies.device))
                for _ in range(SLOTS)
            ]
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
        self, step: ChunkStep, piece: Piece, here: list[torch.Tensor], scale: float, name: str
    ) -> Copied:
        """Bring a piece, step it and send it back; returns its copies back.

        Args:
            here: on the host, master weights, both moments, gradient, and where new weights go.
        """
        there = next(self._slots).views(here)
        arriving = there.gradient if there.coming is None else there.coming
        self._copies.all_to_device([*there.state, arriving], here[:4], name).wait()
        if there.coming is not None:
            there.gradient.copy_(there.coming)
        if scale != 1.0:
            there.gradient.mul_(scale)
        for block in piece.blocks:
            part = slice(block.low - piece.low, block.high - piece.low)
            master, first, second = (tensor[part] for tensor in there.state)
            step.adam(block, master, there.gradient[part], first, second)
        there.leaving.copy_(there.state[0])
        return self._copies.all_to_host([*here[:3], here[4]], [*there.state, there.leaving], name)

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


class Views(NamedTuple):
    """Tensors of a piece on the device: state and gradient in the dtype of master weights; over one another the gradient
    in that of the host's, where it has another, and the new weights, which are made when it has been read."""

    state: list[torch.Tensor]
    gradient: torch.Tensor
    coming: torch.Tensor | None
    leaving: torch.Tensor


class Slot:
    """Device memory of a piece.

    Args:
        memory: [bytes], uint8.
    """

    def __init__(self, memory: torch.Tensor):
        self._memory, self._views = memory, dict[tuple, Views]()

    def views(self, here: Sequence[torch.Tensor]) -> Views:
        """As tensors for those of `here`, which are as in `Streaming._step_piece`; the same for pieces that are alike."""
        master, *_, gradient, weights = here
        like = (master.numel(), master.dtype, gradient.dtype, weights.dtype)
        if like not in self._views:
            size = _aligned(master.numel() * master.element_size())
            *state, wide_gradient = (self._view(i * size, master.numel(), master.dtype) for i in range(4))
            same = gradient.dtype == master.dtype
            coming = None if same else self._view(4 * size, master.numel(), gradient.dtype)
            leaving = self._view(4 * size, master.numel(), weights.dtype)
            self._views[like] = Views(state, wide_gradient, coming, leaving)
        return self._views[like]

    def _view(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[at : at + numel * dtype.itemsize].view(dtype)
