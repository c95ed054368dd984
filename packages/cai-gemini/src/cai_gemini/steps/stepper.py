"""The contract of whoever steps the chunks of one place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.memory.copies import Scalar


class Stepper(Protocol):
    """Steps the chunks of one `StepPlace`."""

    def step(self, chunks: Sequence[OffloadedChunk], scale: float | Scalar) -> None:
        """Step chunks that have gradients, in order, with their gradients times `scale`; others are left alone."""
