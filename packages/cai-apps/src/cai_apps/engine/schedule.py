"""What is computed next: a pure function of the requests, the blocks that are free and the size of a batch.

Batching is continuous (Yu et al., Orca, OSDI 2022): requests come and go between any two forwards. A prompt is computed
in chunks beside the others' next tokens (Agrawal et al., Sarathi-Serve, arXiv:2403.02310). Where blocks run out, the
request of the lowest priority gives its own back and is computed again later.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Demand(NamedTuple):
    """A request as the schedule sees it.

    Args:
        number: the request's.
        length: tokens that it has, prompt and answer.
        computed: tokens of these whose keys are in the cache; of a waiting one those that blocks of others have. One
            of which all are computed is not in the batch, but may give its blocks to others.
        blocks: its blocks in a group of layers; of a waiting one those of `computed`.
        freed: blocks that come free if it gives its own back; of a waiting one those found that nobody holds.
        running: whether it holds its blocks; a waiting one would take them.
        copies: whether the next token goes to a block that others hold too, so that it needs a copy.
        priority: the lowest number goes first.
        arrival: numbers in the order in which requests came.
        needs: the blocks that a waiting one would take for all its tokens.
    """

    number: int
    length: int
    computed: int
    blocks: int
    freed: int
    running: bool
    copies: bool = False
    priority: int = 0
    arrival: int = 0
    needs: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """The place among all requests."""
        return self.priority, self.arrival

    @property
    def missing(self) -> int:
        """Tokens whose keys are not in the cache; one for a request that only goes on."""
        return self.length - self.computed


class Chunk(NamedTuple):
    """Tokens of a request that are computed next.

    Args:
        number: the request's.
        start: the first token.
        tokens: their number.
        blocks: blocks that have to be taken for them, copies among them.
    """

    number: int
    start: int
    tokens: int
    blocks: int


@dataclass(frozen=True)
class Schedule:
    """One forward.

    Args:
        chunks: tokens of each request, those that only go on first.
        admitted: requests among them that waited.
        preempted: requests that give their blocks back before it.
    """

    chunks: tuple[Chunk, ...]
    admitted: tuple[int, ...] = ()
    preempted: tuple[int, ...] = ()


@dataclass(frozen=True)
class Limits:
    """The size of a forward.

    Args:
        tokens: the most tokens.
        requests: the most requests that run.
        block_size: tokens of a block.
        windows: the window of each group of layers, in which a request has blocks of its own; None: all tokens are
            seen.
        prompt_part: the most tokens of a prompt in a forward in which other requests go on; None: as many as there
            is room for.
    """

    tokens: int
    requests: int
    block_size: int
    windows: tuple[int | None, ...] = (None,)
    prompt_part: int | None = None

    def blocks_of(self, length: int) -> int:
        """Return the most blocks that a request of so many tokens holds at a time."""
        blocks = -(-length // self.block_size)
        return sum(
            blocks if window is None else min(blocks, -(-(window - 1 + self.tokens) // self.block_size) + 1)
            for window in self.windows
        )

    def longest(self, blocks: int, most: int | None = None) -> int:
        """Return the tokens of the longest request that so many blocks have room for, and no more than `most`.

        Without `most` a request whose groups all have windows is as long as one without a window would be.
        """
        room = blocks * self.block_size
        low, high = 0, min(room, most or room) if None in self.windows else most or room
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.blocks_of(middle) <= blocks else (low, middle - 1)
        return low


def schedule(running: Sequence[Demand], waiting: Iterable[Demand], free: int, limits: Limits) -> Schedule:
    """Return what is computed next.

    Requests that only go on come first, one token each, then prompts that have begun, then those that wait, each group
    by priority and arrival. A request that goes on where no block is free takes those of the last one that runs and is
    not in the batch yet, or gives up its own; a prompt waits while others go on. One that waits begins when there is
    room for all that it has. A schedule without chunks gives blocks back: the next one has them, those too that several
    requests held.

    Beside requests that go on, a prompt has few tokens, so that a long one does not hold them up. Many prompts have as
    many together as there is room for.

    Args:
        running: the requests that hold blocks.
        waiting: those that wait, in their order; no more are looked at than there is room for, and one.
        free: blocks that nobody holds.
        limits: the size of a forward.
    """
    running = sorted(running, key=lambda demand: demand.order)
    room = _Room(free, limits, [demand.number for demand in running])
    for demand in sorted(
        (demand for demand in running if demand.missing), key=lambda demand: demand.missing > 1
    ):  # stable: those that go on first
        while demand.number in room.running and room.tokens and not room.add(demand):
            if demand.missing > 1 and room.chunks:
                break
            victim = next(other for other in reversed(running) if other.number in room.undecided)
            room.preempt(victim)
    is_stuck = not room.chunks and not room.preempted
    admitted: list[int] = []
    for demand in waiting:
        if is_stuck and not admitted:  # all that run wait for others, which have no room
            for other in reversed(running):
                if len(room.running) >= limits.requests or not room.fits(demand):
                    room.preempt(other)
        is_full = len(room.running) >= limits.requests or not room.tokens or not room.fits(demand)
        if is_full or (room.preempted and not is_stuck):
            break  # nobody overtakes
        room.add(demand)
        admitted.append(demand.number)
        room.running.add(demand.number)
    return Schedule(tuple(room.chunks), tuple(admitted), tuple(room.preempted))


class _Room:
    """What is left of blocks and tokens while a batch is put together."""

    def __init__(self, free: int, limits: Limits, running: Sequence[int]):
        self.free, self.tokens, self._size = free, limits.tokens, limits.block_size
        self._part = limits.tokens if limits.prompt_part is None else limits.prompt_part
        self._most = limits.tokens
        self._groups = len(limits.windows)
        self.running, self.undecided = {*running}, {*running}
        self.chunks: list[Chunk] = []
        self.preempted: list[int] = []

    def fits(self, demand: Demand) -> bool:
        """Return whether there is room for all tokens of a request that waits."""
        return demand.needs + demand.freed <= self.free

    def add(self, demand: Demand) -> bool:
        """Add as many tokens of a request as there is room for; return False where there is none for any."""
        copies = self._groups * demand.copies
        free = self.free - copies - (0 if demand.running else demand.freed)
        room = (demand.blocks + free // self._groups) * self._size - demand.computed
        tokens = min(demand.missing, self.tokens, self._most, room)
        if free < 0 or tokens < 1:
            return False
        blocks = self._groups * (-(-(demand.computed + tokens) // self._size) - demand.blocks)
        self.free = free - blocks
        self.tokens -= tokens
        if demand.running and demand.missing == 1:  # which come before all prompts
            self._most = self._part
        self.undecided.discard(demand.number)
        self.chunks.append(Chunk(demand.number, demand.computed, tokens, blocks + copies))
        return True

    def preempt(self, victim: Demand) -> None:
        """Free the blocks of a request."""
        self.free += victim.freed
        self.running.discard(victim.number)
        self.undecided.discard(victim.number)
        self.preempted.append(victim.number)
