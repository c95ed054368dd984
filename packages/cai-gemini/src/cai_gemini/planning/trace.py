"""The trace of a pass over a model: which chunk at which moment, and how many bytes lay beside them.

The warm-up of PatrickStar (Fang et al., arXiv:2108.05818) and of Colossal-AI's Gemini (Li et al., arXiv:2110.14883): a
pass is run once with as little on the device as possible, and what was seen decides what may stay there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Use:
    """One moment: a chunk's forward or backward (a recompute belongs to the backward)."""

    chunk: int
    backward: bool


@dataclass(frozen=True)
class Trace:
    """A pass, forward and backward.

    Args:
        uses: the uses of chunks, in order.
        other_bytes: bytes on the device that are not weights, gradients or optimizer state, at most, during each use.
        seconds: the compute time of each use, at least.
        also: other chunks in use at that moment, which cannot be freed; none where left out.
    """

    uses: tuple[Use, ...]
    other_bytes: tuple[int, ...]
    seconds: tuple[float, ...]
    also: tuple[frozenset[int], ...] = ()

    def quickest(self, last: Trace | None) -> Trace:
        """This pass with the least seconds of it and the one traced before, where that was the same.

        What a host that is busy adds (libraries that load, state that is made, steps in the background) is no compute.
        """
        if last is None or last.uses != self.uses:
            return self
        return replace(self, seconds=tuple(map(min, self.seconds, last.seconds)))

    def in_use(self, moment: int) -> frozenset[int]:
        """Chunks in use at a moment beside the one it is the use of."""
        return self.also[moment] if self.also else frozenset()

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

    def follow(self, chunk: int, after: int) -> int | None:
        """The moment that a use of `chunk` most likely is, when the last one was `after` (-1: none yet).

        The next such moment, around the end if need be; before all others one that comes straight after a use of the
        chunk used last, so that a pass that was left half way, or repeated, is found again.
        """
        count = len(self.uses)
        ahead = [m for k in range(1, count + 1) if self.uses[m := (after + k) % count].chunk == chunk]
        last = self.uses[after].chunk if after >= 0 else None
        straight = (m for m in ahead if m and self.uses[m - 1].chunk == last)
        return next(straight, ahead[0] if ahead else None)
