"""What a pass over a model asked of the device: which chunk at which moment, and how many bytes lay beside them.

The warm-up of PatrickStar (Fang et al., arXiv:2108.05818) and of Colossal-AI's Gemini (Li et al., arXiv:2110.14883): a
pass is run once with as little on the device as possible, and what was seen decides what may stay there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Use:
    """One moment: a chunk's forward or backward (a recompute belongs to the backward)."""

    chunk: int
    backward: bool


@dataclass(frozen=True)
class Trace:
    """A pass, forward and backward.

    Args:
        uses: in order.
        beside: bytes on the device that are not weights, gradients or optimizer state, at most, during each use.
        seconds: what each use took to compute.
    """

    uses: tuple[Use, ...]
    beside: tuple[int, ...]
    seconds: tuple[float, ...]

    def next_use(self, chunk: int, after: int) -> int | None:
        """The first moment later than `after` that uses `chunk`."""
        for moment in range(after + 1, len(self.uses)):
            if self.uses[moment].chunk == chunk:
                return moment
        return None

    def find(self, use: Use, start: int) -> int | None:
        """The first moment from `start` on that is `use`."""
        for moment in range(start, len(self.uses)):
            if self.uses[moment] == use:
                return moment
        return None
