"""The order in which units are gathered: the same on every rank, whatever a rank uses."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class GatherOrder(Generic[Key]):
    """A sequence of keys that every rank walks through in each pass.

    A rank that uses a key first passes by those before it, so a rank that skips a unit still takes part in its
    gather. What is used out of order is an extra gather, which all ranks must then make.

    Args:
        keys: all keys, in the order of the first forward.
        backward: all keys, in the order of the first backward; default: the reverse.
    """

    def __init__(self, keys: Sequence[Key], backward: Sequence[Key] | None = None):
        self._forward = tuple(keys)
        self._backward = self._forward[::-1] if backward is None else tuple(backward)
        self._sequence: Sequence[Key] = ()
        self._at = 0

    def begin(self, *, backward: bool) -> None:
        """Start at the beginning of a pass."""
        self._sequence, self._at = (self._backward if backward else self._forward), 0

    def end(self) -> list[Key]:
        """Leave the pass; returns the keys that were not reached."""
        rest, self._sequence, self._at = list(self._sequence[self._at :]), (), 0
        return rest

    def use(self, key: Key) -> list[Key]:
        """Walk past `key`; returns the keys passed by on the way. A key that is not ahead changes nothing."""
        ahead = self._sequence[self._at :]
        if key not in ahead:
            return []
        position = ahead.index(key)
        self._at += position + 1
        return list(ahead[:position])

    def is_ahead(self, key: Key) -> bool:
        """Whether `key` is still to come in this pass."""
        return key in self._sequence[self._at :]

    def peek(self) -> Key | None:
        """The key that comes next."""
        return self._sequence[self._at] if self._at < len(self._sequence) else None

    @property
    def last(self) -> Key:
        """The key with which the forward ends."""
        return self._forward[-1]

    def learn(self, forward: Sequence[Key], backward: Sequence[Key]) -> None:
        """Take over an order that all ranks have agreed on; keys it lacks are put after their predecessor."""
        self._forward = complete(forward, self._forward)
        self._backward = complete(backward, self._backward)


def complete(recorded: Sequence[Key], keys: Sequence[Key]) -> tuple[Key, ...]:
    """`recorded` with every key of `keys` it lacks, each after the one that precedes it in `keys`."""
    order = list(recorded)
    for i, key in enumerate(keys):
        if key not in order:
            order.insert(order.index(keys[i - 1]) + 1 if i else 0, key)
    return tuple(order)
