"""Kinds of groups of ranks."""

from enum import Enum

__all__ = ["ParallelMode"]


class ParallelMode(Enum):
    """A kind of groups of ranks."""

    GLOBAL = "global"
    DATA = "data"
    MODEL = "model"
    PIPELINE = "pipe"
    TENSOR = "tensor"
    SEQUENCE = "sequence"
