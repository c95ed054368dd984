"""Handles of communication."""

from __future__ import annotations

from typing import Protocol, runtime_checkable


@runtime_checkable
class CommHandle(Protocol):
    """A communication or copy under way."""

    def wait(self) -> None:
        """Return once the result may be used by the caller's stream."""


class Done:
    """A `CommHandle` of something that has already happened."""

    def wait(self) -> None:
        return None
