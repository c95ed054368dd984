"""Kinds of mixed precision of the first generation; all of them are float16 with master weights here."""

from enum import Enum

__all__ = ["AMP_TYPE"]


class AMP_TYPE(Enum):
    """A kind of mixed precision."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
