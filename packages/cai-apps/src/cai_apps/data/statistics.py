"""What documents are, counted before anything is trained on them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import numpy as np

from cai_apps.data.repeats import Repeats
from cai_apps.data.sources import Entry

SHOWN, LETTERS = 3, 300
"""Documents that are shown, and letters of each."""
AT_ONCE = 64
PERCENTILES = (0, 50, 90, 95, 99, 100)
Ids = Callable[[Sequence[str]], Sequence[Sequence[int]]]
"""(texts) -> the ids of each."""


@dataclass(frozen=True)
class Statistics:
    """What a source of text holds.

    Args:
        records: the number of files of text and of records.
        empty: those of them without text.
        duplicates: the documents whose text was there before.
        bytes: the size of all text in UTF-8.
        characters: the number of its characters.
        tokens: the number of ids, with those that begin and end documents; None: nobody asked for them.
        unit: "tokens", or "characters" where they are what lengths count.
        percentiles: the length that so many of 100 documents do not exceed, by that number.
        length: the most tokens of a row; None: there is no limit.
        longer: the documents that are longer.
        cut_tokens: the tokens of those beyond their first `length`.
        first: places and beginnings of the first documents.
    """

    records: int
    empty: int
    duplicates: int
    bytes: int
    characters: int
    tokens: int | None
    unit: str
    percentiles: dict[str, int]
    length: int | None
    longer: int
    cut_tokens: int
    first: list[tuple[str, str]]

    @property
    def documents(self) -> int:
        """The number of records with text."""
        return self.records - self.empty

    def lines(self) -> list[str]:
        """Return the numbers in a few lines."""
        count = max(1, self.documents)
        lines = [
            f"{self.documents:,} documents of {self.records:,} records; {self.empty:,} are empty, "
            f"{self.duplicates:,} ({self.duplicates / count:.1%}) have the text of one before them",
            f"{self.bytes:,} bytes, {self.characters:,} characters"
            + ("" if self.tokens is None else f", {self.tokens:,} tokens"),
        ]
        if self.percentiles:
            spread = ", ".join(f"{number}% up to {size:,}" for number, size in self.percentiles.items())
            lines.append(f"{self.unit} of a document: {spread}")
        if self.length is not None and self.tokens is not None:
            lines.append(
                f"{self.longer:,} documents ({self.longer / count:.1%}) are longer than {self.length:,} tokens: "
                f"{self.cut_tokens:,} tokens ({self.cut_tokens / max(1, self.tokens):.1%}) stand beyond, and are read "
                "in rows of their own"
            )
        return lines

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name, with the first documents."""
        return asdict(self) | {"documents": self.documents}


def measure(entries: Iterable[Entry], ids: Ids | None, length: int | None) -> Statistics:
    """Return the statistics of documents, which are read once.

    Args:
        entries: the documents with their places; None is a record without a text.
        ids: tokenizes texts; None: lengths are those in characters.
        length: the most tokens of a row; None: there is no limit.
    """
    records = empty = sizes = characters = 0
    repeats, lengths, first = Repeats(), array("q"), []

    def texts() -> Iterator[str]:
        nonlocal records, empty, sizes, characters
        for place, text in entries:
            records += 1
            if not text:
                empty += 1
                continue
            repeats.add(text)
            sizes += len(text.encode(errors="replace"))
            characters += len(text)
            if len(first) < SHOWN:
                first.append((place, text[:LETTERS]))
            yield text

    documents = texts()
    while batch := list(islice(documents, AT_ONCE)):
        lengths.extend(map(len, batch if ids is None else ids(batch)))
    counts = np.array(lengths, dtype=np.int64)
    beyond = (
        np.maximum(0, counts - length) if length is not None and ids is not None else np.zeros_like(counts)
    )
    points = np.percentile(counts, PERCENTILES, method="inverted_cdf") if len(counts) else []
    return Statistics(
        records=records,
        empty=empty,
        duplicates=repeats.count,
        bytes=sizes,
        characters=characters,
        tokens=None if ids is None else int(counts.sum()),
        unit="characters" if ids is None else "tokens",
        percentiles={str(number): int(size) for number, size in zip(PERCENTILES, points, strict=False)},
        length=length,
        longer=int((beyond > 0).sum()),
        cut_tokens=int(beyond.sum()),
        first=first,
    )
