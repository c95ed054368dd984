"""Add to a schedule's compute actions all others: transfers, and the sharding of parameters.

`batches` says which transfers are started together. The executor and the checker both use it, so what is checked is
what is executed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cai_mesh.errors import PlanError
from cai_pipeline.actions import SENDS, TRANSFERS, Action, Kind, Program, holders


def add_transfers(program: Program) -> Program:
    """Insert a receive before each action with input from another rank, and a send after each with output to one.

    Neighbouring stages on one rank need no transfer.
    Raises PlanError for actions that are not compute.
    """
    held = holders(program)

    def elsewhere(stage: int, rank: int) -> bool:
        return stage in held and held[stage] != rank

    lowered: Program = []
    for rank, actions in enumerate(program):
        out: list[Action] = []
        for action in actions:
            if action.kind not in _DIRECTION:
                raise PlanError(
                    f"action {action} is not a compute action", expected="a program not yet lowered"
                )
            step, receive, send = _DIRECTION[action.kind]
            if elsewhere(action.stage - step, rank):
                out.append(Action(receive, action.stage, action.microbatch))
            out.append(action)
            if elsewhere(action.stage + step, rank):
                out.append(Action(send, action.stage, action.microbatch))
        lowered.append(out)
    return lowered


_DIRECTION = {Kind.FORWARD: (1, Kind.RECV_F, Kind.SEND_F), Kind.BACKWARD: (-1, Kind.RECV_B, Kind.SEND_B)}


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
        has_backward = {action.stage for action in actions if action.kind is Kind.BACKWARD}
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


def batches(actions: Sequence[Action], held: Mapping[int, int]) -> list[tuple[Action, ...]]:
    """Group a rank's actions into batches that are started together.

    An adjacent send and receive with the same neighbour form one batch; otherwise two ranks that both send first
    would wait for each other. A batch has at most one send and one receive, so messages keep the order of the list.
    Every other action is a batch of its own.

    Args:
        actions: one rank's lowered actions.
        held: stage -> rank, from `holders`.
    """
    grouped: list[tuple[Action, ...]] = []
    for action in actions:
        before = grouped[-1] if grouped else ()
        if len(before) == 1 and _can_batch(before[0], action, held):
            grouped[-1] = (before[0], action)
        else:
            grouped.append((action,))
    return grouped


def _can_batch(a: Action, b: Action, held: Mapping[int, int]) -> bool:
    if a.kind not in TRANSFERS or b.kind not in TRANSFERS:
        return False
    if (a.kind in SENDS) == (b.kind in SENDS):
        return False
    return held.get(a.partner.stage) == held.get(b.partner.stage)
