"""The algorithms as rows of a table: what each is learned from and compares. Their losses stand in `losses.py`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Algorithm:
    """One way to learn from preferences.

    Args:
        units: the kind of a unit of data: a pair of answers, or one answer that is judged good or bad.
        score: the number that a model gives to an answer: the sum of its tokens' log-probabilities, their mean, or that
            of a value head.
        reference: whether scores are compared with those of a reference model.
        beta: the value of `alignment.beta` where it is left out; None: the algorithm has none.
        options: the other options of `alignment` that it reads.
    """

    units: Literal["pairs", "judged"]
    score: Literal["sum", "mean", "value"]
    reference: bool
    beta: float | None = 0.1
    options: tuple[str, ...] = ()


ALGORITHMS = {
    "reward": Algorithm("pairs", "value", reference=False, beta=None, options=("center",)),
    "dpo": Algorithm("pairs", "sum", reference=True, options=("label_smoothing",)),
    "dpo-hinge": Algorithm("pairs", "sum", reference=True),
    "dpo-robust": Algorithm("pairs", "sum", reference=True, options=("label_smoothing",)),
    "ipo": Algorithm("pairs", "mean", reference=True),
    "ipo-sum": Algorithm("pairs", "sum", reference=True),
    "simpo": Algorithm("pairs", "mean", reference=False, beta=2.0, options=("margin",)),
    "orpo": Algorithm("pairs", "mean", reference=False),
    "kto": Algorithm("judged", "sum", reference=True, options=("desirable_weight", "undesirable_weight")),
}
"""Every algorithm by its name in `alignment.algorithm`."""
