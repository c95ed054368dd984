"""How long prompts and answers are, and which are left out as they fit no row."""

from __future__ import annotations

from array import array
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from cai_apps.data.chat.render import Example
from cai_apps.data.preference.records import Kind
from cai_apps.data.preference.render import PairExample, prompt_size

PARTS: dict[Kind, tuple[str, ...]] = {
    "pairs": ("prompt", "chosen", "rejected"),
    "judged": ("prompt", "completion"),
}


@dataclass(frozen=True)
class PreferenceReport:
    """Lengths of preferences in tokens, those that are left out among them.

    Args:
        kind: "pairs" or "judged".
        count: the number of pairs or judged answers, without those that are left out.
        left_out: the number of those that are longer than `length`.
        length: the most tokens of one, in a pair of both documents together; None: any fits.
        median: the length that half of the parts of a name do not exceed, by "prompt", "chosen" and "rejected", or
            "prompt" and "completion".
        longest: the largest length, by the same names.
        saved: the part of the tokens of all pairs that shared prompts leave out; None: nobody counted.
    """

    kind: Kind
    count: int
    left_out: int
    length: int | None
    median: dict[str, int]
    longest: dict[str, int]
    saved: float | None = None

    def lines(self) -> list[str]:
        """Return the report in a few lines."""
        noun = "pairs" if self.kind == "pairs" else "judged answers"
        if not self.count + self.left_out:
            return [f"no {noun}"]
        lines = [f"{self.count:,} {noun}"]
        lines += [
            f"{name}: half of them up to {self.median[name]:,} tokens, the longest {self.longest[name]:,}"
            for name in PARTS[self.kind]
        ]
        if self.saved is not None:
            lines.append(
                f"alignment.share_prompts would leave out {self.saved:.1%} of the tokens: prompts, once a pair"
            )
        if self.length is not None:
            both = "both documents of a pair together" if self.kind == "pairs" else "a document"
            lines.append(f"{self.left_out:,} are left out: {both} longer than {self.length:,} tokens")
        return lines

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name."""
        return asdict(self)


class PreferenceLengths:
    """Counts preferences, and says which are too long.

    Args:
        kind: "pairs" or "judged".
        length: the most tokens of one, in a pair of both documents together; None: any fits.
    """

    def __init__(self, kind: Kind, length: int | None = None):
        self._kind: Kind = kind
        self._length = length
        self._sizes = {name: array("q") for name in PARTS[kind]}
        self._left_out = self._all = self._once = 0

    def fits(self, example: PairExample | Example, other: Example | None = None) -> bool:
        """Count an example, and return whether it is short enough.

        Args:
            example: the documents of a pair, or that of a judged answer.
            other: the document of the same prompt with another one's answer, which is not counted.
        """
        if isinstance(example, PairExample):
            prompt, documents = example.prefix, (example.chosen, example.rejected)
            size = sum(len(document.ids) for document in documents)
            self._all += size
            self._once += max(prompt - 1, 0)  # the last token is asked for both answers
        else:
            prompt, documents = prompt_size(example), (example,)
            size = max(len(example.ids), 0 if other is None else len(other.ids))
        lengths = (prompt, *(len(document.ids) - prompt for document in documents))
        for name, length in zip(PARTS[self._kind], lengths, strict=True):
            self._sizes[name].append(length)
        too_long = self._length is not None and size > self._length
        self._left_out += too_long
        return not too_long

    def report(self) -> PreferenceReport:
        """Return what has been counted."""
        sizes = {name: np.array(values or [0], dtype=np.int64) for name, values in self._sizes.items()}
        return PreferenceReport(
            self._kind,
            len(self._sizes["prompt"]) - self._left_out,
            self._left_out,
            self._length,
            {name: int(np.percentile(values, 50, method="inverted_cdf")) for name, values in sizes.items()},
            {name: int(values.max()) for name, values in sizes.items()},
            self._once / self._all if self._all else None,
        )
