"""Add to a schedule's compute actions all others: transfers, and the sharding of parameters.

`batches` says which transfers are started together. The executor and the checker both use it, so what is checked is
what is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from cai_mesh.errors import PlanError
from cai_pipeline.plans.actions import (
    COMPUTE,
    SENDS,
    TOWARDS_START,
    TRANSFERS,
    Action,
    Kind,
    Program,
    holders,
)
from cai_pipeline.plans.simulation import simulate


def add_transfers(program: Program) -> Program:
    """Insert a send after each action whose output another rank takes, and a receive before that rank's action.

    Transfers are ordered by when their data are there, on a clock on which a backward takes twice as long as a forward.
    All ranks have them in the order of this one clock, so none waits for another in a circle, even where a transfer
    blocks both its ranks; and a receive is posted when its data are sent, which may be long before they are used.
    Neighbouring stages on one rank need no transfer.

    Raises PlanError for actions that are not compute, and for compute that can never start.
    """
    stage_ranks = holders(program)
    for actions in program:
        for action in actions:
            if action.kind not in COMPUTE:
                raise PlanError(
                    f"action {action} is not a compute action", expected="a program not yet lowered"
                )
    spans = simulate(program).spans
    timed: list[list[tuple[float, int, int, Action]]] = [[] for _ in program]
    for span in spans:
        timed[span.rank].append((span.start, _COMPUTE, 0, span.action))
        if span.action.kind not in _OUTPUT:
            continue
        step, send = _OUTPUT[span.action.kind]
        stage = span.action.stage
        receiver = stage_ranks.get(stage + step)
        if receiver not in (None, span.rank):
            sent = Action(send, stage, span.action.microbatch)
            boundary = min(stage, stage + step)
            timed[span.rank].append((span.end, _TRANSFER, boundary, sent))
            timed[receiver].append((span.end, _TRANSFER, boundary, sent.partner))
    return [[action for *_, action in sorted(of_rank, key=_when)] for of_rank in timed]


_TRANSFER, _COMPUTE = 0, 1
"""The order of actions that begin at one time."""
_OUTPUT = {Kind.FORWARD: (1, Kind.SEND_F)} | dict.fromkeys(TOWARDS_START, (-1, Kind.SEND_B))


def _when(timed: tuple[float, int, int, Action]) -> tuple[float, int, int, bool, int]:
    """Sort key: time, then boundary, so that both directions of a boundary are neighbours; then forwards first."""
    time, what, boundary, action = timed
    backwards = action.kind in (Kind.SEND_B, Kind.RECV_B)
    return time, what, boundary, backwards, action.microbatch or 0


def add_sharding(program: Program) -> Program:
    """Insert UNSHARD before a stage's first action and RESHARD after its last, then REDUCE if it has backwards.

    The last send comes before RESHARD and REDUCE, since another rank waits for it.
    """
    lowered: Program = []
    for actions in program:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            first.setdefault(action.stage, position)
            last[action.stage] = position
        has_backward = {action.stage for action in actions if action.kind in TOWARDS_START}
        out: list[Action] = []
        for position, action in enumerate(actions):
            if first[action.stage] == position:
                out.append(Action(Kind.UNSHARD, action.stage))
            out.append(action)
            if last[action.stage] == position:
                out.append(Action(Kind.RESHARD, action.stage))
                if action.stage in has_backward:
                    out.append(Action(Kind.REDUCE, action.stage))
        lowered.append(out)
    return lowered


def lower(program: Program) -> Program:
    """A compute program with transfers and sharding actions added."""
    return add_sharding(add_transfers(program))


def batches(program: Program) -> list[list[tuple[Action, ...]]]:
    """Group each rank's actions into batches that are started together.

    A send and a receive that are neighbours on both ranks form one batch, so that both directions of a link are used
    at once. A batch has at most one send and one receive, so messages keep the order of the list. Every other action
    is a batch of its own.
    """
    stage_ranks = holders(program)
    after = [{a: b for a, b in pairwise(actions) if _can_batch(a, b, stage_ranks)} for actions in program]
    return [_grouped(actions, after, stage_ranks) for actions in program]


def _grouped(
    actions: Sequence[Action], after: Sequence[Mapping[Action, Action]], stage_ranks: Mapping[int, int]
) -> list[tuple[Action, ...]]:
    grouped: list[tuple[Action, ...]] = []
    for action in actions:
        before = grouped[-1] if grouped else ()
        if len(before) == 1 and _can_batch(before[0], action, stage_ranks):
            a, b = before[0].partner, action.partner
            followers = after[stage_ranks[a.stage]]
            if followers.get(a) == b or followers.get(b) == a:
                grouped[-1] = (before[0], action)
                continue
        grouped.append((action,))
    return grouped


def _can_batch(a: Action, b: Action, stage_ranks: Mapping[int, int]) -> bool:
    """Whether one is a send, the other a receive, and both with the same rank."""
    if a.kind not in TRANSFERS or b.kind not in TRANSFERS:
        return False
    if (a.kind in SENDS) == (b.kind in SENDS):
        return False
    return stage_ranks.get(a.partner.stage) == stage_ranks.get(b.partner.stage)
