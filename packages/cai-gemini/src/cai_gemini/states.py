"""The life of a chunk on the device, as a table, and the bytes that chunks take there."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from cai_mesh.errors import PlanError


class State(enum.Enum):
    """Where a chunk's weights are and what they are doing.

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
    """What happens to a chunk. RENEWED: the optimizer has given it other weights."""

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


@dataclass
class Ledger:
    """Bytes that chunks take on the device, by kind, and the most they ever were.

    Args:
        limit: raise where the sum passes it (None: only count).
        nbytes: by kind.
    """

    limit: int | None = None
    nbytes: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    peak: int = 0
    recent_peak: int = 0
    changed: Callable[[], None] | None = None  # called after every change

    def change(self, kind: str, nbytes: int) -> None:
        """Add bytes (negative: give back) of `kind`. Raises `PlanError` beyond the limit, with nothing changed."""
        total = self.total + nbytes
        if self.limit is not None and nbytes > 0 and total > self.limit:
            described = ", ".join(f"{k} {v:,}" for k, v in self.nbytes.items())
            raise PlanError(
                "the device budget would be exceeded",
                got=f"{total:,} bytes ({described}, and {nbytes:,} more {kind})",
                expected=f"{self.limit:,} bytes",
            )
        self.nbytes[kind] += nbytes
        self.peak = max(self.peak, total)
        self.recent_peak = max(self.recent_peak, total)
        if self.changed is not None:
            self.changed()

    @property
    def total(self) -> int:
        return sum(self.nbytes.values())

    def since(self) -> int:
        """The most since the last call."""
        most, self.recent_peak = self.recent_peak, self.total
        return most
