"""How far a run is, and in what that is counted."""

from __future__ import annotations

from dataclasses import dataclass

VALIDATION = "validation_"
"""The beginning of the names of what a validation measures, in records."""


@dataclass(frozen=True)
class Position:
    """How far a run is: the part of its state that is neither weights nor optimizer."""

    step: int = 0
    samples: int = 0
    """Samples consumed; where the next global batch starts in the shuffled order."""
    units: int = 0
    """Units of throughput consumed, such as tokens."""


@dataclass(frozen=True)
class Unit:
    """What throughput is counted in: "tokens", of which a sample has `per_sample`; "images", of which it is one."""

    name: str
    per_sample: int = 1
