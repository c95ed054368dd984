"""How often all ranks have written parameters together, as by loading a checkpoint.

A rank that has only padding of some parameters writes nothing, and the versions of its tensors stay. Whether what was
gathered before is still true must not depend on that: ranks that disagree gather at different times.
"""

from __future__ import annotations


class _Writes:
    count = 0


def note_writes() -> None:
    """Say that all ranks have written, or may have."""
    _Writes.count += 1


def count_writes() -> int:
    """Return how often they have."""
    return _Writes.count
