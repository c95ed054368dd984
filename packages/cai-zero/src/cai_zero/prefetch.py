"""The order in which units are used, recorded and then predicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class UseOrder(Generic[Key]):
    """Predicts the next use from the order of uses in the step before.

    A step is recorded from `start` to the next `start`. The prediction after a use is what followed it, at the same
    count of occurrences, in the last step; None where the order has changed.
    """

    def __init__(self) -> None:
        self._last: Sequence[Key] = ()
        self._current: list[Key] = []

    def start(self) -> None:
        """A new step begins."""
        if self._current:
            self._last, self._current = tuple(self._current), []

    def is_first(self, key: Key) -> bool:
        """Whether the recorded step began with this use (or nothing is recorded yet)."""
        return not self._current or self._current[0] == key

    def use(self, key: Key) -> Key | None:
        """Record a use and return the predicted next one."""
        position = len(self._current)
        self._current.append(key)
        follows = position + 1 < len(self._last) and self._last[position] == key
        return self._last[position + 1] if follows else None
