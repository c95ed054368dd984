"""Sources of preferences: the files that conversations come in, too, and the pairs that are made here."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator

from cai_apps.data.chat import readers
from cai_apps.data.chat.prepare import placed
from cai_apps.data.files import joined
from cai_apps.data.preference import questions
from cai_apps.data.preference.records import Judged, Kind, Pair, read_preference
from cai_apps.data.records import Record
from cai_mesh.errors import DataError

BLOCK = 1000
"""Pairs that are divided into judged answers at a time, as trl's `unpair_preference_dataset` does."""
Placed = tuple[str, Pair | Judged]
"""A preference after the place of its record."""


def read_records(*sources: str) -> Iterator[Record]:
    """Yield the records of sources, as `readers.read_records` does, or of the pairs that are made here."""
    for source in sources:
        if source != questions.SOURCE:
            yield from readers.read_records(source)
            continue
        for number, value in enumerate(questions.pairs()):
            yield Record(f"{source}, pair {number}", value)


def content(*sources: str, cache: str) -> str:
    """Return a digest of the bytes that the records of sources are read from.

    Args:
        sources: the values of `data.source` and `data.more_sources`.
        cache: the directory `data.cache`, where digests of files are kept.
    """
    pairs = hashlib.sha256(json.dumps(list(questions.pairs())).encode()).hexdigest()
    return joined(
        pairs if source == questions.SOURCE else readers.content(source, cache=cache) for source in sources
    )


def preference_of(record: Record) -> Pair | Judged:
    """Return the preference of a record.

    Raises:
        DataError: it is none; names the record's place.
    """
    if not isinstance(record.value, dict):
        raise record.value
    with placed(record.place):
        return read_preference(record.value)


def check_kind(preference: Pair | Judged, kind: Kind, place: str) -> None:
    """Raise DataError where pairs are asked for and a record is none; a pair is two judged answers.

    Args:
        preference: the record.
        kind: the kind that is asked for.
        place: the place of the record.
    """
    if kind == "pairs" and isinstance(preference, Judged):
        raise DataError(
            f"{place}: the record is one answer with a label, not a pair",
            expected='"chosen" and "rejected"',
            fix='set alignment.algorithm to "kto", which learns from such records, or write pairs',
        )


def check_first(kind: Kind, *sources: str) -> None:
    """Raise DataError where the first record of sources cannot be learned from; the others are not read.

    Args:
        kind: the kind that is asked for.
        sources: the values of `data.source` and `data.more_sources`.
    """
    for record in read_records(*sources):
        check_kind(preference_of(record), kind, record.place)
        return


def judged_answers(preferences: Iterable[Placed]) -> Iterator[tuple[str, Judged]]:
    """Yield judged answers: of every block of pairs the chosen ones, and then the rejected ones."""
    waiting: list[tuple[str, Judged]] = []
    for place, preference in preferences:
        if isinstance(preference, Judged):
            yield place, preference
            continue
        yield place, Judged(preference.prompt, preference.chosen, preference.tools, True)
        waiting.append((place, Judged(preference.prompt, preference.rejected, preference.tools, False)))
        if len(waiting) == BLOCK:
            yield from waiting
            waiting = []
    yield from waiting


def with_others(answers: Iterable[tuple[str, Judged]]) -> Iterator[tuple[str, Judged, Judged]]:
    """Yield place and record of each judged answer, and the next one that has another prompt, at the end the first.

    Of prompt and the other's completion is made what KTO estimates its reference point on (Ethayarajh et al.,
    arXiv:2402.01306).

    Raises:
        DataError: all prompts are the same.
    """
    first: list[Judged] = []
    waiting: list[tuple[str, Judged]] = []
    for place, judged in answers:
        if not first or (len(first) == 1 and judged.prompt != first[0].prompt):
            first.append(judged)
        if waiting and judged.prompt != waiting[0][1].prompt:
            yield from ((*entry, judged) for entry in waiting)
            waiting = []
        waiting.append((place, judged))
    for entry in waiting:
        other = next((judged for judged in first if judged.prompt != entry[1].prompt), None)
        if other is None:
            raise DataError(
                "all judged answers have the same prompt",
                got=f"{len(waiting)} records",
                expected="at least two prompts",
                cause="the reference point is estimated on answers to other prompts",
                fix="use more prompts, or pairs of answers",
            )
        yield *entry, other
