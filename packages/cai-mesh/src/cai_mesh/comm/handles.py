"""Handles of communication."""

from __future__ import annotations


class Done:
    """A `CommHandle` of something that has already happened."""

    def wait(self) -> None:
        return None
