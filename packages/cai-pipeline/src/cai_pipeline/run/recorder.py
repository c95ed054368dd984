"""The costs of a step's compute actions: their times and bytes on this rank, and from all ranks a table of costs."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import torch
import torch.distributed as dist

from cai_mesh.comm import all_gather_object, all_reduce
from cai_pipeline.plans.actions import TOWARDS_START, Action, Kind, Program
from cai_pipeline.plans.placement import Held
from cai_pipeline.plans.scheduler import Costs
from cai_pipeline.plans.simulation import Span, Timeline, simulate

SHOWN_STEP = 4
"""The step whose record is shown: its layers are compiled, and a schedule has been chosen."""


@dataclass(frozen=True)
class Recorded:
    """A compute action as it ran.

    Args:
        action: the action that ran.
        start, end: seconds since all ranks of the pipeline began the step. What it waited for comes before.
        gained: bytes that it added to what the device holds.
    """

    action: Action
    start: float
    end: float
    gained: int


class Recorder:
    """Records a step's compute actions on this rank's device; the host does not wait for it.

    Args:
        group: the ranks of the pipeline, which all make one at the same time.
        device: the device on which this rank computes.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device):
        self.device = device
        self._marks: list[tuple[Action, _Moment, _Moment]] = []
        all_reduce(torch.zeros((), device=device), group).wait()  # so that the ranks' clocks begin together
        self._begun = self._origin = _Moment(device)

    def begin(self) -> None:
        """The next action's inputs are there."""
        self._begun = _Moment(self.device)

    def end(self, action: Action) -> None:
        """The action that was begun last has been started whole."""
        self._marks.append((action, self._begun, _Moment(self.device)))

    def recorded(self) -> list[Recorded]:
        """All actions, in order. Waits for the device."""
        return [
            Recorded(action, start.since(self._origin), end.since(self._origin), end.bytes - start.bytes)
            for action, start, end in self._marks
        ]


class _Moment:
    """A moment on a device's own clock, and the bytes it holds then."""

    def __init__(self, device: torch.device):
        self._event = None
        self.bytes = 0
        if device.type == "cuda":
            self._event = torch.cuda.Event(enable_timing=True)
            self._event.record()
            self.bytes = torch.cuda.memory_allocated(device)
        self._seconds = time.perf_counter()

    def since(self, other: _Moment) -> float:
        """Seconds."""
        if self._event is None or other._event is None:
            return self._seconds - other._seconds
        self._event.synchronize()
        return other._event.elapsed_time(self._event) / 1000


def gather(recorded: Sequence[Recorded], group: dist.ProcessGroup | None) -> list[list[Recorded]]:
    """The records of each rank of the pipeline. Collective."""
    return all_gather_object(list(recorded), group)


def timeline(of_ranks: Sequence[Sequence[Recorded]]) -> Timeline:
    """The step as it ran, in seconds."""
    return Timeline(
        len(of_ranks),
        tuple(
            Span(rank, record.action, record.start, record.end)
            for rank, recorded in enumerate(of_ranks)
            for record in recorded
        ),
    )


def again(of_ranks: Sequence[Sequence[Recorded]], program: Program, stage_ranks: Held) -> Timeline:
    """The step as it is simulated for the median times that its actions took."""
    seconds = _by_kind(of_ranks, lambda record: record.end - record.start)
    return simulate(
        program,
        lambda action: median(seconds[action.kind, action.stage]),
        transfer=_transfer(of_ranks, stage_ranks),
    )


def costs_of(of_ranks: Sequence[Sequence[Recorded]], stage_ranks: Held) -> Costs:
    """Costs of every stage in seconds and bytes: medians over microbatches.

    Args:
        of_ranks: the records of each rank of a step whose backwards were all split.
        stage_ranks: rank of each stage.
    """
    seconds = _by_kind(of_ranks, lambda record: record.end - record.start)
    gained = _by_kind(of_ranks, lambda record: record.gained)

    def of_stages(table: Mapping[tuple[Kind, int], list[float]], kind: Kind) -> tuple[float, ...]:
        return tuple(float(median(table[kind, stage])) for stage in range(len(stage_ranks)))

    kept_bytes = tuple(max(size, 0.0) for size in of_stages(gained, Kind.FORWARD))
    bytes_after_input = map(sum, zip(kept_bytes, of_stages(gained, Kind.BACKWARD_INPUT), strict=True))
    freed = (-size for size in of_stages(gained, Kind.BACKWARD_WEIGHT))
    stashed = (
        max(*sizes, 0.0) for sizes in zip(bytes_after_input, freed, strict=True)
    )  # the two differ by what is passed on
    return Costs(
        of_stages(seconds, Kind.FORWARD),
        of_stages(seconds, Kind.BACKWARD_INPUT),
        of_stages(seconds, Kind.BACKWARD_WEIGHT),
        kept_bytes,
        tuple(map(min, stashed, kept_bytes)),
        _transfer(of_ranks, stage_ranks),
    )


def _by_kind(
    of_ranks: Sequence[Sequence[Recorded]], value: Callable[[Recorded], float]
) -> Mapping[tuple[Kind, int], list[float]]:
    """Values of the actions of all microbatches, by kind and stage."""
    values: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for record in (record for recorded in of_ranks for record in recorded):
        values[record.action.kind, record.action.stage].append(value(record))
    return values


def _transfer(of_ranks: Sequence[Sequence[Recorded]], stage_ranks: Held) -> float:
    """Median time from the end of an action until another rank, which waited for it, went on; 0 if none waited."""
    ends = {record.action: record.end for recorded in of_ranks for record in recorded}
    lags = []
    for recorded in of_ranks:
        free = 0.0
        for record in recorded:
            for needed in _from_another_rank(record.action, stage_ranks):
                if needed in ends and record.start > ends[needed] > free:
                    lags.append(record.start - ends[needed])
            free = record.end
    return median(lags) if lags else 0.0


def _from_another_rank(action: Action, stage_ranks: Held) -> Iterable[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind is Kind.FORWARD and stage > 0 and stage_ranks[stage - 1] != stage_ranks[stage]:
        yield Action(Kind.FORWARD, stage - 1, m)
    if (
        action.kind in TOWARDS_START
        and stage + 1 < len(stage_ranks)
        and stage_ranks[stage + 1] != stage_ranks[stage]
    ):
        yield from (Action(kind, stage + 1, m) for kind in TOWARDS_START)
