"""Decides which chunks are on the device when: pure functions of a trace and a budget.

Two questions. What stays for the whole of training (`Plan`): where each chunk is stepped, and the weights of some.
And at each moment, for the chunks that do not stay (`decide`): what to free and what to bring, so that the chunk in use
is there, chunks needed next come ahead of their use, and those used furthest in the future go first (Belady's rule).
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from cai_gemini.planning.trace import Trace
from cai_mesh.errors import PlanError

AHEAD = 3  # chunks brought before their use, the next one among them
IN_FLIGHT = 2  # gradients on their way to the host


@dataclass(frozen=True)
class Sizes:
    """Bytes of one chunk on the device.

    Args:
        weights: bytes in the dtype of computation.
        gradients: bytes of those of one backward.
        state: bytes of master weights and optimizer state.
        sums: bytes of the sums of several backwards; 0 where a step has only one.
    """

    weights: int
    gradients: int
    state: int
    sums: int = 0


class StepPlace(enum.Enum):
    """The place where a chunk is stepped, in the order in which an optimizer's step begins there.

    DEVICE: there, where its state stays, with its gradients and weights. STREAMED: on the device, piece by piece; its
    state lives on the host. HOST: there, where its state lives. DISK: on the host, while its state is read from a disk
    and written back.
    """

    DEVICE = "device"
    STREAMED = "streamed"
    HOST = "host"
    DISK = "disk"


@dataclass(frozen=True)
class Plan:
    """The chunks that stay on the device, and where chunks are stepped.

    Args:
        weights: chunks whose weights stay.
        places: the place where each chunk is stepped; on the host those that are not in it.
        buffers: bytes for the pieces of chunks that are streamed.
    """

    weights: frozenset[int]
    places: Mapping[int, StepPlace] = field(default_factory=dict)
    buffers: int = 0

    def __post_init__(self) -> None:
        if not self.state <= self.weights:
            raise PlanError(
                "a chunk's state stays without its weights", got=sorted(self.state - self.weights)
            )

    def place(self, chunk: int) -> StepPlace:
        """Return the place where a chunk is stepped."""
        return self.places.get(chunk, StepPlace.HOST)

    @cached_property
    def state(self) -> frozenset[int]:
        """Chunks whose optimizer state stays."""
        return self._stepped(StepPlace.DEVICE)

    @cached_property
    def streamed(self) -> frozenset[int]:
        """Chunks whose state comes in pieces."""
        return self._stepped(StepPlace.STREAMED)

    def _stepped(self, place: StepPlace) -> frozenset[int]:
        return frozenset(chunk for chunk, other in self.places.items() if other is place)

    def resident(self, sizes: Sequence[Sizes]) -> int:
        """Bytes that are on the device at every moment: gradients on their way and those summed over backwards too."""
        stays = sum(sizes[c].weights for c in self.weights)
        stays += sum(
            sizes[c].state + (max(sizes[c].gradients, s) if (s := sizes[c].sums) else 0) for c in self.state
        )
        # those that are summed on the device come one by one, too
        moving = sorted(
            (s.gradients for c, s in enumerate(sizes) if s.sums or c not in self.state), reverse=True
        )
        return stays + sum(moving[:IN_FLIGHT]) + (self.buffers if self.streamed else 0)

    def gradients(self, trace: Trace, sizes: Sequence[Sizes]) -> list[int]:
        """Bytes of gradients that stay, at every moment, where a step has one backward: from there to its end."""
        first: dict[int, int] = {}
        for moment, use in enumerate(trace.uses):
            if use.backward and use.chunk in self.state and not sizes[use.chunk].sums:
                first.setdefault(use.chunk, moment)
        arrivals = [0] * len(trace.uses)
        for chunk, moment in first.items():
            arrivals[moment] += sizes[chunk].gradients
        return list(accumulate(arrivals))


@dataclass(frozen=True)
class Moves:
    """The moves before a moment: chunks to free, then chunks to bring (the one in use first, if it is not there)."""

    free: tuple[int, ...] = ()
    bring: tuple[int, ...] = ()


def room(trace: Trace, sizes: Sequence[Sizes], plan: Plan, budget: int) -> list[int]:
    """Bytes for the weights of chunks that do not stay, at every moment."""
    free_bytes = budget - plan.resident(sizes)
    gradients = plan.gradients(trace, sizes)
    return [
        free_bytes - other_bytes - more
        for other_bytes, more in zip(trace.other_bytes, gradients, strict=True)
    ]


def decide(
    trace: Trace,
    moment: int,
    present: Collection[int],
    sizes: Sequence[Sizes],
    plan: Plan,
    room: Sequence[int],
) -> Moves:
    """The moves before `moment`.

    Args:
        present: chunks that do not stay and are on the device or on their way.
        room: bytes for weights at every moment, as `room` returns them.

    What is brought ahead fits until it is used, beside every chunk used before it.
    """

    def needed(chunks: Iterable[int], moments: Iterable[int]) -> list[int]:
        """Bytes of `chunks` and of all that is in use, at each of `moments`."""
        chosen = {*chunks} - plan.weights
        total = sum(sizes[c].weights for c in chosen)
        used = (trace.in_use(when) - plan.weights - chosen for when in moments)
        return [total + sum(sizes[c].weights for c in more) for more in used]

    pinned = trace.in_use(moment)
    movable = [c for c in present if c not in plan.weights and c not in pinned]
    distance = {c: _distance(trace, c, moment) for c in movable}
    current = trace.uses[moment].chunk
    bring: list[int] = []
    if current not in plan.weights:
        distance[current] = moment
        if current not in movable:
            bring.append(current)
    nearest = sorted(distance, key=lambda c: distance[c])  # soonest first
    for chunk, when in _upcoming(trace, moment, plan, AHEAD):
        if chunk in distance or (chunk in pinned and chunk in present):
            continue
        sooner = [c for c in nearest if distance[c] <= when]
        until = range(moment, when + 1)
        if any(most > room[at] for at, most in zip(until, needed([*sooner, chunk], until), strict=True)):
            break
        distance[chunk] = when
        nearest = sorted(distance, key=lambda c: distance[c])
        bring.append(chunk)
    free, (total,) = list[int](), needed(nearest, [moment])
    for chunk in reversed(nearest):
        if total <= room[moment]:
            break
        if chunk in movable and chunk != current:
            free.append(chunk)
            total -= sizes[chunk].weights
    return Moves(tuple(free), tuple(bring))


def _distance(trace: Trace, chunk: int, moment: int) -> int:
    later = trace.next_use(chunk, moment)
    return len(trace.uses) if later is None else later


def _upcoming(trace: Trace, moment: int, plan: Plan, count: int) -> list[tuple[int, int]]:
    """The next `count` chunks that do not stay, other than the current one, and when they are used."""
    next_use: dict[int, int] = {}
    for later in range(moment + 1, len(trace.uses)):
        chunk = trace.uses[later].chunk
        if chunk != trace.uses[moment].chunk and chunk not in plan.weights and chunk not in next_use:
            next_use[chunk] = later
            if len(next_use) == count:
                break
    return list(next_use.items())


def smallest_budget(trace: Trace, sizes: Sequence[Sizes], stays: Collection[int] = ()) -> int:
    """The least a pass can do with: at every moment the chunks in use alone, beside what always stays."""
    least = Plan(frozenset(stays))
    resident = least.resident(sizes)
    return max(
        resident
        + trace.other_bytes[moment]
        + sum(sizes[c].weights for c in {use.chunk, *trace.in_use(moment)} - least.weights)
        for moment, use in enumerate(trace.uses)
    )


def fits(trace: Trace, sizes: Sequence[Sizes], plan: Plan, budget: int) -> bool:
    """Whether every moment has room for the chunks it uses."""
    return all(
        sum(sizes[c].weights for c in {trace.uses[moment].chunk, *trace.in_use(moment)} - plan.weights)
        <= free_bytes
        for moment, free_bytes in enumerate(room(trace, sizes, plan, budget))
    )


@dataclass(frozen=True)
class Streamable:
    """The chunks that may be stepped on the device piece by piece.

    Args:
        able: chunks.
        buffers: bytes for pieces of any of them.
    """

    able: frozenset[int] = frozenset()
    buffers: int = 0


NONE_STREAMABLE = Streamable()


def fractions(
    trace: Trace,
    sizes: Sequence[Sizes],
    weights: float,
    state: float,
    streamed: float = 0.0,
    streamable: Streamable = NONE_STREAMABLE,
) -> Plan:
    """A plan by static fractions of all bytes: chunks in the order of their first use, until the fraction is reached.

    State that stays is that of the chunks used first, so that the host has the time of their forward to step others.
    What is streamed is spread over the rest, so that neither the host nor the link waits for its share.
    """
    order = list(dict.fromkeys(use.chunk for use in trace.uses))
    order += [c for c in range(len(sizes)) if c not in order]
    stays = _first(order, [s.state for s in sizes], state)
    resident = _first(order, [s.weights for s in sizes], weights)
    able = [c for c in order if c in streamable.able and c not in stays]
    spread = _spread(able, [s.state for s in sizes], streamed)
    return Plan(resident | stays, on_device(stays, spread), streamable.buffers)


def on_device(state: Iterable[int], streamed: Iterable[int] = ()) -> dict[int, StepPlace]:
    """The places of chunks that the device steps: those whose state stays there, and those whose state is streamed."""
    return {**dict.fromkeys(state, StepPlace.DEVICE), **dict.fromkeys(streamed, StepPlace.STREAMED)}


def _first(order: Sequence[int], bytes_of: Sequence[int], fraction: float) -> frozenset[int]:
    most, total, chosen = fraction * sum(bytes_of), 0, []
    for chunk in order:
        if total + bytes_of[chunk] > most * (1 + 1e-9):
            break
        total += bytes_of[chunk]
        chosen.append(chunk)
    return frozenset(chosen)


def _spread(order: Sequence[int], bytes_of: Sequence[int], fraction: float) -> frozenset[int]:
    """Chunks with a fraction of all bytes, evenly between those that are left out."""
    target = fraction * sum(bytes_of)
    share = min(target / max(sum(bytes_of[c] for c in order), 1), 1.0)
    passed, total, chosen = 0.0, 0, []
    for chunk in order:
        passed += share * bytes_of[chunk]
        if total + bytes_of[chunk] / 2 < passed * (1 + 1e-9):
            total += bytes_of[chunk]
            chosen.append(chunk)
    return frozenset(chosen)
