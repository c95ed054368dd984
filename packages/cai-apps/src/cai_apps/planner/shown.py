"""What a run will need, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Shown:
    """A plan as `cai plan` prints it.

    Args:
        text: the plan as lines for people.
        facts: the same for programs: what JSON can hold. Sizes are bytes.
        chart: a step of the pipeline, a line for each of its ranks; empty without one.
    """

    text: str
    facts: dict[str, Any]
    chart: str = ""
