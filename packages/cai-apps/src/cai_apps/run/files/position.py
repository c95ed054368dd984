"""How far a run is, and in what that is counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cai_apps.run.files.standing import Standing

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
    standing: Standing = field(default_factory=Standing)
    """What its validations say."""

    @classmethod
    def of_value(cls, value: Mapping[str, Any]) -> Position:
        """Return the position that a checkpoint holds as a plain value."""
        return cls(**{**value, "standing": Standing(**value.get("standing", {}))})


@dataclass(frozen=True)
class Unit:
    """What throughput is counted in: "tokens", of which a sample has `per_sample`; "images", of which it is one."""

    name: str
    per_sample: int = 1
