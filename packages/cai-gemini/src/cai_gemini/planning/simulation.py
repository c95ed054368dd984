"""Predicts how long a step would take: compute, the two directions of the link, the host's steps and the disk as lanes.

The model behind `auto`, and the floor that a measured step is held to.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from cai_gemini.planning.policy import (
    NONE_STREAMABLE,
    Plan,
    Sizes,
    Streamable,
    decide,
    fits,
    on_device,
    room,
)
from cai_gemini.planning.trace import Trace

HOST_BYTES = (
    28  # a parameter: master weights and two moments read and written, gradient read, weights written
)

GAIN = 0.95  # of the seconds without it, at most, for state to be stepped on the device piece by piece


@dataclass(frozen=True)
class Rates:
    """The rates of the machine, in bytes a second.

    Args:
        to_device, to_host: copies of pinned memory, one direction at a time.
        both: the sum of both directions when they run at once.
        host_step: host memory moved by the optimizer.
        device_step: device memory moved by the optimizer.
        disk_read, disk_write: the disk's rates; infinite where it costs nothing.
        host_beside: as `host_step`, while both directions of the link are busy; None: as without.
    """

    to_device: float
    to_host: float
    both: float
    host_step: float
    device_step: float
    disk_read: float = math.inf
    disk_write: float = math.inf
    host_beside: float | None = None

    def link_seconds(self, up: int, down: int) -> float:
        """Return the seconds of copies in both directions at once."""
        return max(up / self.to_device, down / self.to_host, (up + down) / self.both)


@dataclass
class Lanes:
    """Busy intervals (start, end, chunk) of a simulated or measured step, by lane."""

    compute: list[tuple[float, float, int]] = field(default_factory=list)
    to_device: list[tuple[float, float, int]] = field(default_factory=list)
    to_host: list[tuple[float, float, int]] = field(default_factory=list)
    host: list[tuple[float, float, int]] = field(default_factory=list)
    disk: list[tuple[float, float, int]] = field(default_factory=list)

    @property
    def end(self) -> float:
        return max((span[1] for lane in vars(self).values() for span in lane), default=0.0)


@dataclass(frozen=True)
class DiskBytes:
    """The bytes that a chunk moves from and to a disk.

    Args:
        read, written: bytes of its optimizer step.
        weights: read before each copy to the device.
    """

    read: int = 0
    written: int = 0
    weights: int = 0


@dataclass(frozen=True)
class Step:
    """The parts of a step.

    Args:
        parameters: their number by chunk.
        passes: backward passes a step.
        disk: the bytes that chunks on a disk move, by chunk.
        streamable: the chunks that may be stepped on the device though their state lives on the host.
    """

    parameters: Sequence[int]
    passes: int = 1
    disk: Mapping[int, DiskBytes] = field(default_factory=dict)
    streamable: Streamable = NONE_STREAMABLE


def _piece_bytes(sizes: Sizes) -> tuple[int, int]:
    """Return the bytes to the device and back, by a step there of state on the host."""
    return sizes.state + max(sizes.gradients, sizes.sums), sizes.state + sizes.weights


def simulate(
    trace: Trace, sizes: Sequence[Sizes], plan: Plan, budget: int, rates: Rates, step: Step
) -> tuple[float, Lanes]:
    """Seconds of a step in the long run, and its lanes (of the last of a few steps, starting at 0)."""
    run = _Run(trace, sizes, plan, room(trace, sizes, plan, budget), rates, step)
    before = run.one()
    if step.disk:  # what one step writes is in the way of the next one's reads, and that of its weights
        before = run.one()
    return run.one() - before, run.lanes


class _Run:
    def __init__(
        self, trace: Trace, sizes: Sequence[Sizes], plan: Plan, room: Sequence[int], rates: Rates, step: Step
    ):
        self._trace, self._sizes, self._plan, self._room = trace, sizes, plan, room
        self._rates, self._step = rates, step
        # with both directions busy each gets its share of `both`; steps are long enough that they mostly are
        shared = rates.both / (rates.to_device + rates.to_host)
        self._up, self._down = rates.to_device * min(shared, 1.0), rates.to_host * min(shared, 1.0)
        self._ready = dict.fromkeys(
            range(len(sizes)), 0.0
        )  # when a chunk's weights are on the host or device
        self._compute = self._link_up = self._link_down = self._host = self._disk = 0.0
        self._streaming = self._streaming_until = 0.0  # as far as chunks are done, and as all of them will be
        self._start = 0.0
        self.lanes = Lanes()

    def one(self) -> float:
        """Run a step; returns when its last pass has been computed."""
        self._start, self.lanes = self._compute, Lanes()
        for _ in range(self._step.passes):
            self._pass()
        end = self._compute
        self._update(max(end, self._link_down))
        return end

    def _pass(self) -> None:
        present: dict[int, float] = {}
        for moment, use in enumerate(self._trace.uses):
            moves = decide(self._trace, moment, present, self._sizes, self._plan, self._room)
            for chunk in moves.free:
                del present[chunk]
            for chunk in moves.bring:
                present[chunk] = self._bring(chunk)
            ready = present.get(use.chunk, self._ready[use.chunk])
            begin = max(self._compute, ready)
            self._compute = begin + self._trace.seconds[moment]
            self.lanes.compute.append(self._span(begin, self._compute, use.chunk))
            if use.backward and use.chunk not in self._plan.state:
                self._send(use.chunk)

    def _span(self, begin: float, end: float, chunk: int) -> tuple[float, float, int]:
        return begin - self._start, end - self._start, chunk

    def _on_disk(self, after: float, seconds: float, chunk: int) -> float:
        """Keep the disk busy; returns when it is done."""
        if not seconds:
            return after
        begin = max(self._disk, after)
        self._disk = begin + seconds
        self.lanes.disk.append(self._span(begin, self._disk, chunk))
        return self._disk

    def _bring(self, chunk: int) -> float:
        ready, disk = self._ready[chunk], self._step.disk.get(chunk)
        if disk is not None and disk.weights and chunk not in self._plan.state:
            ready = self._on_disk(ready, disk.weights / self._rates.disk_read, chunk)
        begin = max(self._link_up, ready)
        self._link_up = begin + self._sizes[chunk].weights / self._up
        self.lanes.to_device.append(self._span(begin, self._link_up, chunk))
        self._hold_up(chunk, begin, self._link_up - begin)
        return self._link_up

    def _hold_up(self, chunk: int, begin: float, seconds: float) -> None:
        """Weights that come while state is streamed go before its pieces."""
        if begin < self._streaming:
            self._streaming += seconds
            for other in self._plan.streamed - {chunk}:
                if self._ready[other] > begin:
                    self._ready[other] += seconds

    def _send(self, chunk: int) -> None:
        begin = max(self._link_down, self._compute)
        self._link_down = begin + self._sizes[chunk].gradients / self._down
        self.lanes.to_host.append(self._span(begin, self._link_down, chunk))

    def _update(self, norm_time: float) -> None:
        """The optimizer, once the norm is known: on the device at once, on the host in the order of use."""
        device = (
            sum(self._step.parameters[c] for c in self._plan.state) * HOST_BYTES / self._rates.device_step
        )
        self._compute += device
        for chunk in self._plan.state:
            self._ready[chunk] = self._compute
        order = [
            chunk
            for chunk in dict.fromkeys(use.chunk for use in self._trace.uses)
            if chunk not in self._plan.state
        ]
        streamed = [chunk for chunk in order if chunk in self._plan.streamed]
        self._streaming = max(self._streaming, norm_time)
        self._streaming_until = self._streaming + sum(self._streaming_seconds(chunk) for chunk in streamed)
        reading = {c: d for c in order if (d := self._step.disk.get(c)) is not None and d.read}
        for chunk in order:
            if chunk in self._plan.streamed:
                self._stepped(chunk, self._step_streamed(chunk))
            elif chunk not in reading:
                self._stepped(chunk, self._step_on_host(chunk, norm_time))
        self._update_disk(reading, norm_time)

    def _streaming_seconds(self, chunk: int) -> float:
        return self._rates.link_seconds(*_piece_bytes(self._sizes[chunk]))

    def _step_streamed(self, chunk: int) -> float:
        begin = self._streaming
        self._streaming += self._streaming_seconds(chunk)
        for lane in (self.lanes.to_device, self.lanes.to_host):
            lane.append(self._span(begin, self._streaming, chunk))
        return self._streaming

    def _step_on_host(self, chunk: int, ready: float) -> float:
        begin = max(self._host, ready)
        rate = self._rates.host_step
        if begin < self._streaming_until:
            rate = self._rates.host_beside or rate
        self._host = begin + self._step.parameters[chunk] * HOST_BYTES / rate
        self.lanes.host.append(self._span(begin, self._host, chunk))
        return self._host

    def _stepped(self, chunk: int, ready: float) -> None:
        self._ready[chunk] = ready
        if chunk in self._plan.weights:
            self._ready[chunk] = self._bring(chunk)

    def _update_disk(self, chunks: Mapping[int, DiskBytes], norm_time: float) -> None:
        """One chunk is read while the one before it is stepped and written."""
        order, read = list(chunks), dict[int, float]()
        for at, chunk in enumerate(order):
            for ahead in order[at : at + 2]:
                if ahead not in read:
                    read[ahead] = self._on_disk(norm_time, chunks[ahead].read / self._rates.disk_read, ahead)
            ready = self._step_on_host(chunk, read[chunk])
            written = self._on_disk(ready, chunks[chunk].written / self._rates.disk_write, chunk)
            self._stepped(chunk, written if chunks[chunk].weights else ready)


def floor(trace: Trace, sizes: Sequence[Sizes], plan: Plan, rates: Rates, step: Step) -> float:
    """Seconds no step under `plan` can beat: the busiest of compute, link, host and disk, each without a gap."""
    moving = [c for c in range(len(sizes)) if c not in plan.state]
    compute = step.passes * sum(trace.seconds)
    compute += sum(step.parameters[c] for c in plan.state) * HOST_BYTES / rates.device_step
    pieces = [_piece_bytes(sizes[c]) for c in plan.streamed]
    up = sum(sizes[c].weights for c in moving) + sum(up for up, _ in pieces)
    down = step.passes * sum(sizes[c].gradients for c in moving if _has_backward(trace, c))
    link = rates.link_seconds(up, down + sum(down for _, down in pieces))
    host = sum(step.parameters[c] for c in moving if c not in plan.streamed) * HOST_BYTES / rates.host_step
    on_disk = [step.disk[c] for c in moving if c in step.disk]
    read, written = sum(d.read + d.weights for d in on_disk), sum(d.written for d in on_disk)
    return max(compute, link, host, read / rates.disk_read + written / rates.disk_write)


def _has_backward(trace: Trace, chunk: int) -> bool:
    return any(use.backward and use.chunk == chunk for use in trace.uses)


def best_plan(
    trace: Trace,
    sizes: Sequence[Sizes],
    budget: int,
    rates: Rates,
    step: Step,
    stays: Collection[int] = (),
) -> Plan:
    """The plan of the shortest simulated step: the state of the first n chunks stays, and as many weights as fit.

    Every n is tried; for each, weights stay from the first use on, all that fit and half of those. Then again with
    state of the others shared out between the host and the device, where the link has time.
    """
    order = [*dict.fromkeys(use.chunk for use in trace.uses)]
    fastest: dict[bool, tuple[float, Plan]] = {}
    for count in range(len(order) + 1):
        state = frozenset(order[:count])
        streamed = _shared_out(order[count:], sizes, rates, step)
        for some in dict.fromkeys([frozenset[int](), streamed]):
            least = Plan(state | frozenset(stays), on_device(state, some), step.streamable.buffers)
            most = _most_weights(trace, sizes, budget, least, order)
            for resident_count in [] if most is None else {most, (count + most) // 2}:
                plan = replace(least, weights=least.weights | frozenset(order[:resident_count]))
                seconds, _ = simulate(trace, sizes, plan, budget, rates, step)
                best = fastest.get(bool(some))
                if best is None or seconds <= best[0]:  # of equals, the one with more on the device
                    fastest[bool(some)] = (seconds, plan)
    nothing = (math.inf, Plan(frozenset(stays)))
    plain, pieces = fastest.get(False, nothing), fastest.get(True, nothing)
    return pieces[1] if pieces[0] < GAIN * plain[0] else plain[1]


def _shared_out(order: Sequence[int], sizes: Sequence[Sizes], rates: Rates, step: Step) -> frozenset[int]:
    """Choose those chunks with state on the host that the device steps: each goes where it is done first."""
    host = link = 0.0
    streamed = []
    for chunk in order:
        host_end = host + step.parameters[chunk] * HOST_BYTES / (rates.host_beside or rates.host_step)
        link_end = link + rates.link_seconds(*_piece_bytes(sizes[chunk]))
        if chunk in step.streamable.able and link_end < host_end:
            streamed.append(chunk)
            link = link_end
        else:
            host = host_end
    return frozenset(streamed)


def _most_weights(
    trace: Trace, sizes: Sequence[Sizes], budget: int, least: Plan, order: Sequence[int]
) -> int | None:
    """Return how many chunks' weights can stay beside what stays at least; None when that does not fit at all."""

    def do(count: int) -> bool:
        return fits(trace, sizes, replace(least, weights=least.weights | frozenset(order[:count])), budget)

    low, high = len(least.state), len(order)
    if not do(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if do(middle):
            low = middle
        else:
            high = middle - 1
    return low
