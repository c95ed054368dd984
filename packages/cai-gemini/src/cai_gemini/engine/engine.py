"""Moves the chunks of one model between host and device while it trains.

Is told of their uses. The first passes run with as little on the device as possible and are traced; then a
plan says what stays, and `policy.decide` what comes and goes before each use. A use the trace does not know (a branch
taken for the first time) brings its chunk on demand and has the next pass traced again.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.states import State
from cai_gemini.engine.clock import Clock
from cai_gemini.memory.allocator import let_go
from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.ledger import Ledger
from cai_gemini.memory.timeline import Recorder, Timeline
from cai_gemini.memory.worker import Worker, leave_cores
from cai_gemini.nvme import NvmeStore
from cai_gemini.planning.budget import UNLIMITED, memory_for
from cai_gemini.planning.policy import (
    IN_FLIGHT,
    Moves,
    Plan,
    Sizes,
    StepPlace,
    decide,
    fits,
    room,
    smallest_budget,
)
from cai_gemini.planning.trace import Trace, Use
from cai_gemini.steps.device import DeviceSteps, keep_on_device
from cai_gemini.steps.disk import DiskSteps
from cai_gemini.steps.host import HostSteps
from cai_gemini.steps.stepper import Stepper
from cai_gemini.steps.streaming import StreamedSteps, keep_streamed
from cai_mesh.errors import PlanError

Planner = Callable[[Trace, Sequence[Sizes], int], Plan]


@dataclass(frozen=True)
class Schedule:
    """The moment and the limits of the engine's plan.

    Args:
        budget: bytes of device memory for everything.
        planner: makes the plan from a trace, sizes and the number of backward passes a step.
        warmup: optimizer steps before it plans.
    """

    budget: int
    planner: Planner
    warmup: int = 2


class Engine:
    """Moves the chunks of a model between host and device. The chunks are made with it; then `start` takes them.

    A pass is what lies between `begin` and `end`, usually a forward and a backward. While `recording`, it is traced.

    Args:
        device: the device on which the chunks are used.
    """

    def __init__(self, device: torch.device):
        self.copies, self.worker, self.ledger = Copies(device), Worker("cai_gemini", device), Ledger()
        self.trace: Trace | None = None
        self.store: NvmeStore | None = None
        self._steppers: dict[StepPlace, Stepper] = {
            StepPlace.DEVICE: DeviceSteps(),
            StepPlace.HOST: HostSteps(),
        }
        self.planned = False
        self.steps = self._passes = 0  # passes of the step under way
        self._seen: list[Use] = []
        self._beside: list[int] = []
        self._also: list[frozenset[int]] = []
        self.recording = True
        self._surprised = False  # by a use the trace does not know
        self._fresh: set[int] = set()  # trained since the plan was made
        self._moment, self._room, self._sizes = -1, list[int](), list[Sizes]()  # as of the plan
        self._sending: deque[tuple[Copied, int]] = deque()

    def start(
        self,
        chunks: Sequence[OffloadedChunk],
        schedule: Schedule,
        observe: Callable[[], int] | None,
        always: Collection[OffloadedChunk] = (),
    ) -> None:
        """Take the chunks of a model; those of `always` stay on the device, such as what lies around the blocks."""
        self.chunks, self._schedule = list(chunks), schedule
        self._clock = Clock(self.copies.device, self.ledger, observe)
        self._always = frozenset(i for i, chunk in enumerate(chunks) if chunk in always)
        self.plan = self._first_plan()
        for i in self._always:
            self.chunks[i].stays = True
            self.chunks[i].bring()

    def reschedule(self, schedule: Schedule) -> None:
        """Take another schedule, before anything was traced, and chunks where they have come to be since."""
        self._schedule, self.plan = schedule, self._first_plan()

    def _first_plan(self) -> Plan:
        """The plan with as little as possible on the device, and every chunk stepped where it is."""
        return Plan(self._always, {i: chunk.place for i, chunk in enumerate(self.chunks)})

    def use_store(self, store: NvmeStore) -> None:
        """Let chunks be on the disk of a store, and be stepped as they are read from there."""
        self.store, self._steppers[StepPlace.DISK] = store, DiskSteps(store)

    @property
    def sizes(self) -> list[Sizes]:
        return [chunk.sizes for chunk in self.chunks]

    # -- uses ----------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """A pass begins."""
        self._moment = -1
        self._seen.clear()
        self._beside.clear()
        self._also.clear()
        if self._surprised:
            self.recording, self._surprised = True, False
        if self.recording:  # at other times torch's statistics are the user's
            self._clock.seconds()
            self._clock.beside()

    def prepare(self, index: int, *, backward: bool | None) -> None:
        """A chunk will be used next: make room, and begin to bring it, where it is missing, and others ahead.

        backward: in which direction; None where that is not known yet.
        """
        use = Use(index, bool(backward))
        if self.recording:
            self._clock.stop()
            if self._seen:
                self._beside.append(self._clock.beside())
            self._seen.append(use)
            self._also.append(frozenset(i for i, h in enumerate(self.chunks) if h.in_use and i != index))
        moves = self._moves(use, direction_known=backward is not None)
        for other in moves.free:
            if not self.chunks[other].in_use:
                self.chunks[other].free()
        for other in moves.bring:
            self.chunks[other].bring()

    def had_backward(self, index: int) -> None:
        """The last use of a chunk was a backward: its gradient has come."""
        if self.recording:
            last = max((i for i, use in enumerate(self._seen) if use.chunk == index), default=None)
            if last is not None:
                self._seen[last] = Use(index, True)

    def computing(self, chunk: OffloadedChunk) -> None:
        """The use of a chunk begins to compute."""
        if self.recording:
            self._clock.start()
        if self.copies.recorder is not None:
            self.copies.recorder.used(chunk.name)

    def _moves(self, use: Use, *, direction_known: bool) -> Moves:
        present = [
            i for i, h in enumerate(self.chunks) if h.state is not State.FREE and i not in self.plan.weights
        ]
        if self.trace is not None and self.planned:
            after = self._moment
            moment = (
                self.trace.find(use, after + 1) if direction_known else self.trace.follow(use.chunk, after)
            )
            if moment is not None:
                self._moment = moment
                return decide(self.trace, moment, present, self._sizes, self.plan, self._room)
            self._surprised = True
        free = [i for i in present if i != use.chunk]
        missing = self.chunks[use.chunk].state is State.FREE
        return Moves(tuple(free), (use.chunk,) if missing else ())

    def end(self) -> None:
        """The pass is over."""
        self._passes += 1
        if self.copies.recorder is not None:
            self.copies.recorder.used(None)
        if self.recording and self._seen:
            self._clock.stop()
            self._beside.append(self._clock.beside())
            seconds = tuple(self._clock.seconds())
            trace = Trace(tuple(self._seen), tuple(self._beside), seconds, tuple(self._also))
            self.trace = trace.quickest(self.trace)
            self.recording = not self.planned and self.steps + 1 < self._schedule.warmup
            if self.planned:
                self._adopt(self.plan)
        self._retire(0)

    # -- gradients on their way ----------------------------------------------------------------------------------

    def sent(self, chunk: OffloadedChunk, copied: Copied | None) -> None:
        """A gradient is on its way to the host (None: it stays)."""
        if copied is not None:
            self._sending.append((copied, chunk.sizes.gradients))

    def make_room(self) -> None:
        """Wait until one more gradient may be on the device."""
        with self._clock.paused() if self.recording else contextlib.nullcontext():
            self._retire(IN_FLIGHT - 1, wait=True)

    def _retire(self, most: int, *, wait: bool = False) -> None:
        while self._sending and (self._sending[0][0].done or (wait and len(self._sending) > most)):
            sent, nbytes = self._sending.popleft()
            sent.synchronize()
            self.ledger.change("gradients", -nbytes)

    # -- the plan ------------------------------------------------------------------------------------------------

    def ready_to_plan(self) -> bool:
        return not self.planned and self.trace is not None and self.steps + 1 >= self._schedule.warmup

    def make_plan(self) -> None:
        """Decide what stays, and move it."""
        assert self.trace is not None
        self._retire(0, wait=True)
        sizes = self.sizes
        least, device = smallest_budget(self.trace, sizes, self._always), self.copies.device
        if least > self._schedule.budget:
            raise PlanError(
                "the device memory is too small for one layer at a time",
                got=f"{memory_for(self._schedule.budget, device):,} bytes",
                expected=f"at least {memory_for(least, device):,} bytes",
                cause=f"a use of {self._heaviest()} with its activations",
                fix="raise device_memory, take smaller batches, or recompute activations",
            )
        plan = self._schedule.planner(self.trace, sizes, max(self._passes, 1))
        planned = {i: place for i, place in plan.places.items() if self.chunks[i].step is not None}
        places = {**self._first_plan().places, **planned}
        self._adopt(replace(plan, weights=plan.weights | self._always, places=places))
        let_go(device)
        self._stream()
        for i in sorted(self.plan.weights):
            chunk = self.chunks[i]
            if chunk.state is State.FREE:
                chunk.bring()
            chunk.arrive()
            chunk.stays = True
        for i in sorted(self.plan.state):
            keep_on_device(self.chunks[i])
        self.planned, self.recording = True, False

    def _stream(self) -> None:
        """Let the plan's state be stepped on the device piece by piece from now on."""
        if self.plan.streamed:
            streamed = StreamedSteps(self.copies, self.ledger, self.plan.buffers)
            self._steppers[StepPlace.STREAMED] = streamed
        for i in sorted(self.plan.streamed):
            keep_streamed(self.chunks[i], self.copies.device)

    def _adopt(self, plan: Plan) -> None:
        assert self.trace is not None
        sizes, budget = self.sizes, self._schedule.budget
        self._sizes = sizes
        if self.planned and not fits(self.trace, sizes, plan, budget):
            plan = self._with_fewer_weights(plan)
        if not fits(self.trace, sizes, plan, budget):
            raise PlanError(
                "the plan does not fit the device memory",
                got=f"{plan.resident(sizes):,} bytes stay on the device",
                expected=f"{budget:,} bytes with activations and the chunk in use",
                fix="keep less on the device, or use residency='auto'",
            )
        self.plan, self._room = plan, room(self.trace, sizes, plan, budget)

    def _with_fewer_weights(self, plan: Plan) -> Plan:
        """A plan after which weights come and go again, but for those that must stay."""
        stay = self._always | plan.state
        for i in plan.weights - stay:
            self.chunks[i].stays = False
        return replace(plan, weights=plan.weights & stay)

    def _heaviest(self) -> str:
        assert self.trace is not None
        sizes = self.sizes
        needs = [
            b + sizes[u.chunk].weights for u, b in zip(self.trace.uses, self.trace.other_bytes, strict=True)
        ]
        return repr(self.chunks[self.trace.uses[needs.index(max(needs))].chunk].name)

    # -- step ----------------------------------------------------------------------------------------------------

    def step(self, scale: float | torch.Tensor) -> None:
        """Step every chunk that has a gradient where the plan says, those used first first."""
        if self.ready_to_plan():
            self.make_plan()
        if self._fresh:
            self._keep_fresh()
        if self.copies.device.type == "cuda":
            leave_cores()
        factor = self.copies.scalar(scale)
        order = self._order()
        for chunk in (self.chunks[i] for i in order):
            if chunk.gradients.touched and not chunk.stays and chunk.state is not State.FREE:
                chunk.free()
        for place in StepPlace:
            chunks = [self.chunks[i] for i in order if self.plan.place(i) is place]
            if chunks:
                self._steppers[place].step(chunks, factor)
        self.steps += self.trace is not None  # a step without a pass is none
        self._passes = 0

    def complete_gradients(self) -> None:
        """Return with the gradients of the coming step complete on all ranks."""
        for chunk in self.chunks:
            chunk.unit.complete()

    def check_cleared(self) -> None:
        """Raise `PlanError` where the last step has consumed gradients that nobody has cleared since."""
        for chunk in self.chunks:
            chunk.gradients.check_cleared()

    def drop_gradients(self, *, zeros: bool = False) -> None:
        """Forget every gradient of what the optimizer has, or let it be zero: no backward of this step counts."""
        for chunk in self.chunks:
            clear = chunk.gradients.zero_members if zeros else chunk.gradients.drop_members
            clear(chunk.members)
        self._passes = 0

    def trains_more(self, chunks: Iterable[OffloadedChunk]) -> None:
        """These were frozen and are trained from now on: the next pass is traced, and the plan must fit it."""
        if self.planned:
            self._sizes, self._surprised = self.sizes, True
            chunk_set = set(chunks)
            self._fresh |= {i for i, chunk in enumerate(self.chunks) if chunk in chunk_set} - self.plan.state

    def _keep_fresh(self) -> None:
        """Let state of chunks trained since follow to the device, where all other state is, as far as there is room."""
        assert self.trace is not None
        trained = {i for i, chunk in enumerate(self.chunks) if chunk.step is not None}
        if trained - self._fresh == self.plan.state:
            for i in sorted(self._fresh):
                places = {**self.plan.places, i: StepPlace.DEVICE}
                with_it = replace(self.plan, weights=self.plan.weights | {i}, places=places)
                if fits(self.trace, self.sizes, with_it, self._schedule.budget):
                    if self.chunks[i].state is State.FREE:
                        self.chunks[i].bring()
                    keep_on_device(self.chunks[i])
                    self._adopt(with_it)
        self._fresh.clear()

    def _order(self) -> list[int]:
        """All chunks, in the order of their first uses."""
        uses = () if self.trace is None else self.trace.uses
        return list(dict.fromkeys([*(use.chunk for use in uses), *range(len(self.chunks))]))

    # -- a look at it --------------------------------------------------------------------------------------------

    def record(self) -> None:
        """Take down what happens from now on."""
        recorder = Recorder(self.copies.device, self.ledger)
        self.copies.recorder, self.ledger.changed = recorder, recorder.changed

    def recorded(self) -> Timeline:
        """Return the timeline since `record`, host steps to their end. Raises `PlanError` where there is none."""
        recorder = self.copies.recorder
        if recorder is None:
            raise PlanError("no timeline was recorded", fix="call record_timeline() before the step")
        self.finish()
        self.copies.recorder = self.ledger.changed = None
        budget = self._schedule.budget
        return recorder.timeline(budget if budget < UNLIMITED else None)

    def finish(self) -> None:
        """Wait for every step, on the disk too."""
        for chunk in self.chunks:
            chunk.finish_writing()

    def settle(self) -> None:
        """Wait for every step and bring what is on the disk into memory."""
        for chunk in self.chunks:
            chunk.settle()
