"""Small models of the same kind, on which transforms try themselves before they change a model."""

from __future__ import annotations

from cai_mesh.trial.inputs import MAKERS, parts_of, small_inputs
from cai_mesh.trial.small_model import HEADS, SmallModel, Trial, arguments_of, shrunk, tensors_of

__all__ = [
    "HEADS",
    "MAKERS",
    "SmallModel",
    "Trial",
    "arguments_of",
    "parts_of",
    "shrunk",
    "small_inputs",
    "tensors_of",
]
