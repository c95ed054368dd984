"""The time of a program: a timeline and its bubble, from the durations of actions. No tensors, no processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import COMPUTE, TOWARDS_START, Action, Kind, Program, holders

UNIT_DURATIONS: Mapping[Kind, float] = {
    Kind.FORWARD: 1.0,
    Kind.BACKWARD: 2.0,
    Kind.BACKWARD_INPUT: 1.0,
    Kind.BACKWARD_WEIGHT: 1.0,
}
"""A backward takes twice as long as a forward, as matrix products do without recompute; each half as long as one."""


@dataclass(frozen=True)
class Span:
    """The time of one compute action on a pipeline rank: [start, end), in the units of the durations."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """The compute actions of a step, with their times.

    Args:
        ranks: number of pipeline ranks.
        spans: all compute actions, by rank and then by start.
    """

    ranks: int
    spans: tuple[Span, ...]

    @property
    def makespan(self) -> float:
        """Time from the start of the step to the end of its last compute action."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def bubble(self) -> float:
        """The share of rank-time in which nothing is computed, 0 to 1.

        With equal stages it is (p - 1) / (m + p - 1) for both GPipe and 1F1B.
        """
        total = self.ranks * self.makespan
        return 1.0 - sum(span.end - span.start for span in self.spans) / total if total else 0.0


def simulate(
    program: Program,
    durations: Mapping[Kind, float] | Callable[[Action], float] = UNIT_DURATIONS,
    *,
    transfer: float = 0.0,
) -> Timeline:
    """The timeline of a program, lowered or not, with transfers that overlap compute.

    Args:
        program: each rank's actions; only compute takes time.
        durations: time of a compute action, by kind or by a function of the action. Any unit, not negative.
        transfer: time from the end of a compute action until its output is on another rank.

    Raises:
        PlanError: actions wait for each other, or for one that is not in the program.
    """
    stage_ranks = holders(program)
    cost = durations if callable(durations) else lambda action: durations[action.kind]
    queues = [[action for action in actions if action.kind in COMPUTE] for actions in program]
    position = [0] * len(queues)
    clock = [0.0] * len(queues)
    ends: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in queues]
    progress = True
    while progress:
        progress = False
        for rank, queue in enumerate(queues):
            while position[rank] < len(queue):
                action = queue[position[rank]]
                start = _start(action, rank, stage_ranks, ends, transfer)
                if start is None:
                    break
                start = max(start, clock[rank])
                ends[action] = clock[rank] = start + cost(action)
                spans[rank].append(Span(rank, action, start, ends[action]))
                position[rank] += 1
                progress = True
    for rank, queue in enumerate(queues):
        if position[rank] < len(queue):
            raise PlanError(
                f"action {queue[position[rank]]} (rank {rank}) can never start", fix="run check on it"
            )
    return Timeline(len(queues), tuple(span for of_rank in spans for span in of_rank))


def _start(
    action: Action, rank: int, stage_ranks: Mapping[int, int], ends: Mapping[Action, float], transfer: float
) -> float | None:
    """The time at which the inputs of an action are there, or None while one is missing."""
    stage, m = action.stage, action.microbatch
    inputs: list[tuple[Action, ...]] = []
    """The actions that must come before, one or the other of each tuple."""
    if action.kind is Kind.FORWARD:
        inputs += [(Action(Kind.FORWARD, stage - 1, m),)] * (stage > 0)
    elif action.kind is Kind.BACKWARD_WEIGHT:
        inputs.append((Action(Kind.BACKWARD_INPUT, stage, m),))
    else:
        inputs.append((Action(Kind.FORWARD, stage, m),))
        inputs += [tuple(Action(kind, stage + 1, m) for kind in TOWARDS_START)] * (stage + 1 in stage_ranks)
    latest = 0.0
    for either in inputs:
        predecessor = next((action for action in either if action in ends), None)
        if predecessor is None:
            return None
        latest = max(
            latest, ends[predecessor] + (transfer if stage_ranks[predecessor.stage] != rank else 0.0)
        )
    return latest
