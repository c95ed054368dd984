"""Build the schedule for measured times, within a limit of memory.

A list scheduler goes through a step on a clock. Whenever a rank is free it begins the most urgent action whose inputs
are there: a gradient of an input before a forward, a forward if its activations fit, and a weight gradient where none
of these is ready, or will be soon. What is urgent and what is soon are a `Policy`; `search` tries several, and the
named schedules that fit the same limit, and returns the fastest. It is after the heuristic of Qi et al. 2023
(https://arxiv.org/abs/2401.10241, section 3.1), for any placement and for stages that differ.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import Action, Kind, Program
from cai_pipeline.plans.placement import Held, stages_of
from cai_pipeline.plans.schedules import SCHEDULES, program
from cai_pipeline.plans.simulation import simulate

FORWARD, INPUT, WEIGHT = Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT
SLACK = 1e-9
"""The part of a limit that sums of floats may be over it."""


@dataclass(frozen=True)
class Costs:
    """The costs of one microbatch on each stage.

    Args:
        forward, backward_input, backward_weight: time of each action, in any unit; a whole backward takes the sum of
            the last two.
        kept: bytes from a forward to the gradient of its input.
        stashed: the part of those bytes that stays up to the gradient of the weights.
        transfer: time until another rank has what a stage made.
    """

    forward: tuple[float, ...]
    backward_input: tuple[float, ...]
    backward_weight: tuple[float, ...]
    kept: tuple[float, ...]
    stashed: tuple[float, ...]
    transfer: float = 0.0

    def duration(self, action: Action) -> float:
        """Time of a compute action."""
        stage = action.stage
        if action.kind is FORWARD:
            return self.forward[stage]
        both = action.kind is Kind.BACKWARD
        return self.backward_input[stage] * (action.kind is INPUT or both) + self.backward_weight[stage] * (
            action.kind is WEIGHT or both
        )

    def gained(self, action: Action) -> float:
        """Bytes that a compute action adds to what its rank holds."""
        kept_bytes, stashed_bytes = self.kept[action.stage], self.stashed[action.stage]
        return {
            FORWARD: kept_bytes,
            INPUT: stashed_bytes - kept_bytes,
            WEIGHT: -stashed_bytes,
            Kind.BACKWARD: -kept_bytes,
        }[action.kind]


@dataclass(frozen=True)
class Policy:
    """Args:
    patience: a weight gradient is begun unless something more urgent will be ready within this part of its time.
    later_first: the later of two stages of a rank is more urgent; else the earlier.
    even: the gradients of inputs of the stage that is behind are more urgent than those of others.
    """

    patience: float = 0.0
    later_first: bool = True
    even: bool = False


POLICIES = tuple(
    itertools.starmap(Policy, itertools.product((0.0, 0.3, 0.6, 1.0), (True, False), (False, True)))
)


@dataclass(frozen=True)
class Found:
    """Args:
    program: the compute actions of each rank.
    name: the schedule's name, "searched" for one without.
    time: time of a step, in the unit of the costs.
    bytes: the most that each rank holds.
    """

    program: Program
    name: str
    time: float
    bytes: tuple[float, ...]


def search(
    held: Held,
    microbatches: int,
    costs: Costs,
    limits: Sequence[float],
    *,
    policies: Sequence[Policy] = POLICIES,
) -> Found:
    """The fastest schedule found.

    Args:
        held: rank of each stage.
        microbatches: microbatches per step.
        costs: costs of each stage.
        limits: bytes of activations that each rank may hold.
        policies: policies to try beside the named schedules; each takes about a second for 15,000 actions.

    Raises:
        PlanError: none fits the limits.
    """
    schedules = [
        Found(
            candidate,
            name,
            simulate(candidate, costs.duration, transfer=costs.transfer).makespan,
            most_bytes(candidate, costs),
        )
        for name, candidate in _candidates(held, microbatches, costs, limits, policies)
    ]
    fitting = [schedule for schedule in schedules if all(map(_fits, schedule.bytes, limits))]
    if not fitting:
        least = min((max(schedule.bytes) for schedule in schedules), default=None)
        raise PlanError(
            "no schedule fits the memory of every rank",
            got=f"{min(limits):g} bytes for activations",
            expected="" if least is None else f"{least:g} bytes, as the smallest known schedule takes",
            fix="recompute, smaller microbatches, or more ranks",
        )
    return min(fitting, key=lambda schedule: schedule.time)


def most_bytes(program: Program, costs: Costs) -> tuple[float, ...]:
    """The most bytes of activations that each rank holds at one time."""
    return tuple(max(itertools.accumulate(map(costs.gained, actions)), default=0.0) for actions in program)


def _fits(needed: float, limit: float) -> bool:
    return needed <= limit * (1 + SLACK)


def _candidates(
    stage_ranks: Held, microbatches: int, costs: Costs, limits: Sequence[float], policies: Sequence[Policy]
) -> Iterator[tuple[str, Program]]:
    for name in SCHEDULES:
        try:
            yield name, program(name, stage_ranks, microbatches)
        except PlanError:  # it does not take this placement
            continue
    for policy in policies:
        searched_program = greedy(stage_ranks, microbatches, costs, limits, policy)
        if searched_program is not None:
            yield "searched", searched_program


def greedy(
    stage_ranks: Held, microbatches: int, costs: Costs, limits: Sequence[float], policy: Policy
) -> Program | None:
    """The schedule of one policy; None where a rank cannot go on within its limit. Arguments as of `search`."""
    state = _State(stage_ranks, microbatches, costs, limits, policy)
    clock = [(0.0, rank) for rank in range(max(stage_ranks) + 1)]
    while clock:
        now, rank = heapq.heappop(clock)
        if now < state.free[rank]:
            continue
        chosen = state.choose(rank, now)
        if isinstance(chosen, float):
            heapq.heappush(clock, (chosen, rank))
        elif chosen is not None:
            for moment, woken in state.begin(chosen, rank, now):
                heapq.heappush(clock, (moment, woken))
    action_count = 3 * microbatches * len(stage_ranks)
    return state.program if sum(map(len, state.program)) == action_count else None


@dataclass
class _State:
    """The progress of a step."""

    stage_ranks: Held
    microbatches: int
    costs: Costs
    limits: Sequence[float]
    policy: Policy
    program: Program = field(init=False)
    free: list[float] = field(init=False)
    """The time from which each rank is free."""
    bytes: list[float] = field(init=False)
    done: dict[tuple[Kind, int], int] = field(init=False)
    """Microbatches that an action of a stage has begun."""
    ends: dict[Action, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        ranks = max(self.stage_ranks) + 1
        self.rank_stages = [stages_of(self.stage_ranks, rank) for rank in range(ranks)]
        self.program, self.free, self.bytes = [[] for _ in range(ranks)], [0.0] * ranks, [0.0] * ranks
        self.done = {
            (kind, stage): 0 for kind in (FORWARD, INPUT, WEIGHT) for stage in range(len(self.stage_ranks))
        }

    def choose(self, rank: int, now: float) -> Action | float | None:
        """The action that a rank begins now; or when something will be ready; None where that is not known yet."""
        order = self.rank_stages[rank][::-1] if self.policy.later_first else self.rank_stages[rank]
        coming: list[float] = []
        for kind, stages in ((INPUT, self._by_progress(order)), (FORWARD, order)):
            for stage in stages:
                ready = self._ready(kind, stage)
                if ready is None or (kind is FORWARD and not self._has_room(rank, stage)):
                    continue
                if ready <= now:
                    return self._next(kind, stage)
                coming.append(ready)
        waiting = [stage for stage in order if self.done[WEIGHT, stage] < self.done[INPUT, stage]]
        soonest = min(coming, default=None)
        if waiting:
            stage = max(waiting, key=lambda s: self.done[INPUT, s] - self.done[WEIGHT, s])
            if soonest is None or soonest - now >= self.policy.patience * self.costs.backward_weight[stage]:
                return self._next(WEIGHT, stage)
        return soonest

    def begin(self, action: Action, rank: int, now: float) -> Iterator[tuple[float, int]]:
        """Begin an action; yields when which ranks should look again."""
        end = now + self.costs.duration(action)
        self.program[rank].append(action)
        self.free[rank] = self.ends[action] = end
        self.bytes[rank] += self.costs.gained(action)
        self.done[action.kind, action.stage] += 1
        yield end, rank
        neighbour = action.stage + {FORWARD: 1, INPUT: -1, WEIGHT: 0}[action.kind]
        if 0 <= neighbour < len(self.stage_ranks) and self.stage_ranks[neighbour] != rank:
            other = self.stage_ranks[neighbour]
            yield max(end + self.costs.transfer, self.free[other]), other

    def _next(self, kind: Kind, stage: int) -> Action:
        return Action(kind, stage, self.done[kind, stage])

    def _by_progress(self, order: Sequence[int]) -> Sequence[int]:
        return sorted(order, key=lambda stage: self.done[INPUT, stage]) if self.policy.even else order

    def _ready(self, kind: Kind, stage: int) -> float | None:
        """The time at which the inputs of a stage's next action are there; None while one is not on its way."""
        m = self.done[kind, stage]
        if m == self.microbatches:
            return None
        inputs = [Action(FORWARD, stage, m)] if kind is INPUT else []
        before = stage + (1 if kind is INPUT else -1)
        if 0 <= before < len(self.stage_ranks):
            inputs.append(Action(kind, before, m))
        if any(action not in self.ends for action in inputs):
            return None
        away = [
            self.costs.transfer * (self.stage_ranks[action.stage] != self.stage_ranks[stage])
            for action in inputs
        ]
        return max((self.ends[action] + far for action, far in zip(inputs, away, strict=True)), default=0.0)

    def _has_room(self, rank: int, stage: int) -> bool:
        """Whether a forward fits, with those of the same microbatch that must follow it on the rank's later stages."""
        behind = [
            s
            for s in self.rank_stages[rank]
            if s > stage and self.done[FORWARD, s] <= self.done[FORWARD, stage]
        ]
        needed = self.bytes[rank] + sum(self.costs.kept[s] for s in (stage, *behind))
        return _fits(needed, self.limits[rank])
