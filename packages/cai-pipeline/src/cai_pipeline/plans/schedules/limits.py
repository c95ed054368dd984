"""Limits of a schedule: the stages of a rank, the microbatches of a step, and whether weight gradients wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Limits:
    """Numbers that a schedule takes, for those who ask before there is a program.

    Args:
        stages: number of stages of a rank: one, any, or two, which lie in a V.
        split: whether backwards are split, so that weight gradients wait.
        microbatches: the fewest of a step, for each rank.
    """

    stages: Literal["one", "any", "two"] = "one"
    split: bool = False
    microbatches: int = 0
