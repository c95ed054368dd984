"""From a schedule's compute actions to everything a rank does: transfers, and the sharding of parameters.

Also says which neighbouring transfers are started together (`batches`), which the executor performs and the
checker proves, so both mean the same thing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cai_mesh.errors import PlanError
from cai_pipeline.actions import SENDS, TRANSFERS, Action, Kind, Program, holders


def add_transfers(program: Program) -> Program:
    """Insert a receive before each compute whose input is on another rank, a send after each whose output is.

    Stages next to each other on one rank hand over in memory and get no transfer.
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
    """Insert UNSHARD before a stage's first action, RESHARD after its last, then REDUCE if it has
    backwards.

    The last send comes before RESHARD and REDUCE, since another rank waits for it.
    """
    lowered: Program = []
    for actions in program:
        first: dict[int, int] = {}
        last: dict[int, int] = {}
        for position, action in enumerate(actions):
            first.setdefault(action.stage, position)
            last[action.stage] = position
        learns = {action.stage for action in actions if action.kind is Kind.BACKWARD}
        out: list[Action] = []
        for position, action in enumerate(actions):
            if first[action.stage] == position:
                out.append(Action(Kind.UNSHARD, action.stage))
            out.append(action)
            if last[action.stage] == position:
                out.append(Action(Kind.RESHARD, action.stage))
                if action.stage in learns:
                    out.append(Action(Kind.REDUCE, action.stage))
        lowered.append(out)
    return lowered


def lower(program: Program) -> Program:
    """A compute program with its transfers and its sharding actions."""
    return add_sharding(add_transfers(program))


def batches(actions: Sequence[Action], held: Mapping[int, int]) -> list[tuple[Action, ...]]:
    """Group a rank's actions into what is started together.

    A send and a receive that stand next to each other and go to the same neighbour form one batch: two ranks
    that each want to send first would otherwise wait for each other. A batch has at most one send and one
    receive, so the order on the wire is the order in the list. Everything else stands alone.

    Args:
        actions: one rank's lowered actions.
        held: stage -> rank, from `holders`.
    """
    grouped: list[tuple[Action, ...]] = []
    for action in actions:
        before = grouped[-1] if grouped else ()
        if len(before) == 1 and _meet(before[0], action, held):
            grouped[-1] = (before[0], action)
        else:
            grouped.append((action,))
    return grouped


def _meet(a: Action, b: Action, held: Mapping[int, int]) -> bool:
    if a.kind not in TRANSFERS or b.kind not in TRANSFERS:
        return False
    if (a.kind in SENDS) == (b.kind in SENDS):
        return False
    return held.get(a.partner.stage) == held.get(b.partner.stage)
