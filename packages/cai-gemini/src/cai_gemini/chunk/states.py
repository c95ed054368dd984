"""The life of a chunk on the device, as a table."""

from __future__ import annotations

import enum

from cai_mesh.errors import PlanError


class State(enum.Enum):
    """The place of a chunk's weights and what they are doing.

    FREE: on the host or a disk only. COMING: on their way to the device. HOLD: there, not used in this pass yet.
    COMPUTE: in use. HOLD_AFTER_FORWARD: there, used by the forward. HOLD_AFTER_BACKWARD: there, used by the backward;
    gradients are complete.
    """

    FREE = "free"
    COMING = "coming"
    HOLD = "hold"
    COMPUTE = "compute"
    HOLD_AFTER_FORWARD = "hold after forward"
    HOLD_AFTER_BACKWARD = "hold after backward"


class Event(enum.Enum):
    """An event of a chunk. RENEWED: the optimizer has given it other weights."""

    BRING = "bring"
    ARRIVED = "arrived"
    USE = "use"
    FORWARD_OVER = "forward over"
    BACKWARD_OVER = "backward over"
    FREED = "freed"
    RENEWED = "renewed"


_THERE = (State.HOLD, State.HOLD_AFTER_FORWARD, State.HOLD_AFTER_BACKWARD)
TABLE: dict[tuple[State, Event], State] = {
    (State.FREE, Event.BRING): State.COMING,
    (State.COMING, Event.ARRIVED): State.HOLD,
    (State.COMING, Event.FREED): State.FREE,
    (State.COMPUTE, Event.USE): State.COMPUTE,
    (State.COMPUTE, Event.FORWARD_OVER): State.HOLD_AFTER_FORWARD,
    (State.COMPUTE, Event.BACKWARD_OVER): State.HOLD_AFTER_BACKWARD,
    (State.HOLD_AFTER_FORWARD, Event.BACKWARD_OVER): State.HOLD_AFTER_BACKWARD,
    (State.HOLD, Event.BACKWARD_OVER): State.HOLD_AFTER_BACKWARD,
    (State.HOLD_AFTER_BACKWARD, Event.BACKWARD_OVER): State.HOLD_AFTER_BACKWARD,
    **{(state, Event.USE): State.COMPUTE for state in _THERE},
    **{(state, Event.FREED): State.FREE for state in _THERE},
    **{(state, Event.RENEWED): State.COMING for state in _THERE},
    (State.FREE, Event.RENEWED): State.FREE,
    (State.FREE, Event.BACKWARD_OVER): State.FREE,
}


def follow(state: State, event: Event, chunk: str) -> State:
    """The state after `event`. Raises `PlanError` for what the table does not have, as a use of a freed chunk."""
    after = TABLE.get((state, event))
    if after is None:
        allowed = ", ".join(e.value for s, e in TABLE if s is state)
        raise PlanError(
            f"chunk {chunk!r} cannot do this now",
            got=f"{event.value} in state {state.value}",
            expected=allowed,
        )
    return after
