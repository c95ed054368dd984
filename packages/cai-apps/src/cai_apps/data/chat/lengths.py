"""How long conversations are, and what is cut off them."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass

import numpy as np

from cai_apps.data.chat.render import Example, truncate


@dataclass(frozen=True)
class LengthReport:
    """Lengths of conversations in tokens, before any is cut.

    Args:
        count: the number of conversations.
        minimum: the shortest one's length.
        median: the length that half of them do not exceed.
        percentile_95: the length that 95 of 100 do not exceed.
        maximum: the longest one's length.
        tokens: the tokens that are kept.
        trained: those of them that are trained on.
        length: the length at which conversations are cut; None: none is.
        truncated: the conversations that are cut, without those that are dropped.
        dropped: the conversations of which nothing is left that is trained on.
    """

    count: int
    minimum: int
    median: int
    percentile_95: int
    maximum: int
    tokens: int
    trained: int
    length: int | None
    truncated: int
    dropped: int

    def lines(self) -> list[str]:
        """Return the report in a few lines."""
        if not self.count:
            return ["no conversation"]
        share = self.trained / max(1, self.tokens)
        lines = [
            f"{self.count:,} conversations of {self.minimum:,} to {self.maximum:,} tokens, half of them up to "
            f"{self.median:,}, 95% up to {self.percentile_95:,}",
            f"{self.tokens:,} tokens are kept, {self.trained:,} of them ({share:.0%}) are trained on",
        ]
        if self.length is not None:
            lines.append(
                f"{self.truncated:,} are cut at {self.length:,} tokens; {self.dropped:,} are dropped, as nothing that "
                "is trained on is left of them"
            )
        return lines

    def facts(self) -> dict[str, int | None]:
        """Return the numbers by name."""
        return asdict(self)


class Lengths:
    """Cuts examples and counts what that does.

    Args:
        length: the most tokens of an example; None: they are kept as they are.
    """

    def __init__(self, length: int | None = None):
        self._length = length
        self._lengths = array("q")
        self._tokens = self._trained = self._truncated = self._dropped = 0

    def cut(self, example: Example) -> Example | None:
        """Return what is kept of an example; None: it is dropped."""
        self._lengths.append(len(example.ids))
        shortened = example if self._length is None else truncate(example, self._length)
        if shortened is None:
            self._dropped += 1
            return None
        self._truncated += shortened is not example
        self._tokens += len(shortened.ids)
        self._trained += int(shortened.trained.sum())
        return shortened

    def report(self) -> LengthReport:
        """Return what has been counted."""
        lengths = (
            np.frombuffer(self._lengths, dtype=np.int64) if self._lengths else np.zeros(1, dtype=np.int64)
        )
        points = np.percentile(lengths, [0, 50, 95, 100], method="inverted_cdf")
        minimum, median, longer, maximum = map(int, points)
        return LengthReport(
            len(self._lengths),
            minimum,
            median,
            longer,
            maximum,
            self._tokens,
            self._trained,
            self._length,
            self._truncated,
            self._dropped,
        )
