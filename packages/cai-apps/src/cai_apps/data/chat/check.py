"""What is in a file of conversations: every record that is broken, a few as they are rendered, and their lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from cai_apps.data.chat.lengths import LengthReport, Lengths
from cai_apps.data.chat.prepare import conversation_of, placed
from cai_apps.data.chat.readers import Record, read_records, record_files
from cai_apps.data.chat.render import Renderer
from cai_mesh.errors import DataError

SHOWN = 3
"""Conversations that are shown."""


@dataclass(frozen=True)
class Sample:
    """A conversation as it is rendered: the text in parts that are trained on or not."""

    place: str
    parts: list[tuple[str, bool]]


@dataclass
class Findings:
    """What a source holds.

    Args:
        count: the number of records.
        problems: the errors of those that are broken, in their order.
        samples: the first conversations that are not.
        lengths: the lengths of all that are not; None: they were not rendered.
        ends: the ids that end answers, with the number of conversations.
    """

    count: int = 0
    problems: list[DataError] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lengths: LengthReport | None = None
    ends: Counter[int] = field(default_factory=Counter)


def check_source(source: str, renderer: Renderer | None, length: int | None) -> Findings:
    """Return what is in a source of conversations.

    Args:
        source: a file, a glob, or a directory of datasets.save_to_disk.
        renderer: renders them; None: only the form of records is looked at.
        length: the most tokens of a conversation; None: as many as it has.

    Raises:
        ConfigError: the template is broken.
        DataError: there is no such file, or nothing in it.
    """
    findings, lengths = Findings(), Lengths(length)
    for record in _records(source, findings.problems):
        findings.count += 1
        try:
            conversation = conversation_of(record)
            if renderer is None:
                continue
            with placed(record.place):
                example, parts = renderer.pieces(conversation)
        except DataError as error:
            findings.problems.append(error)
            continue
        lengths.cut(example)
        findings.ends[renderer.end_of(example)] += 1
        if len(findings.samples) < SHOWN:
            findings.samples.append(Sample(record.place, parts))
    if not (findings.count or findings.problems):
        raise DataError(f"there is no record in {source}", expected="at least one conversation")
    findings.lengths = None if renderer is None else lengths.report()
    return findings


def _records(source: str, problems: list[DataError]) -> Iterator[Record]:
    """Yield the records of a source up to where a file cannot be read on, which is a problem itself."""
    record_files(source)  # a source that is not there, or of another kind, is no problem of a record
    try:
        yield from read_records(source)
    except DataError as error:
        problems.append(error)
