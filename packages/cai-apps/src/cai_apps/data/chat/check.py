"""What is in a file of conversations: every record that is broken, a few as they are rendered, and their lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from cai_apps.data.chat.lengths import Lengths
from cai_apps.data.chat.prepare import conversation_of, placed
from cai_apps.data.chat.readers import read_records, record_files
from cai_apps.data.chat.render import Renderer
from cai_apps.data.records import Record
from cai_apps.data.repeats import Repeats
from cai_mesh.errors import DataError

SHOWN = 3
"""Records that are shown."""
Mark = Literal["", "+", "-"]
"""What a part of a text is: "+" is trained on, "-" is an answer that is not preferred, "" is neither."""


@dataclass(frozen=True)
class Sample:
    """A record as it is rendered: its text in parts, with a mark each."""

    place: str
    parts: list[tuple[str, Mark]]


class Report(Protocol):
    """Lengths of records, counted."""

    count: int

    def lines(self) -> list[str]:
        """Return the report in a few lines."""
        ...

    def facts(self) -> dict[str, Any]:
        """Return the numbers by name."""
        ...


@dataclass
class Findings:
    """What a source holds.

    Args:
        kind: "conversations", "pairs" or "judged".
        count: the number of records.
        repeats: counts records that have the content of one before them.
        problems: the errors of those that are broken, in their order.
        samples: the first records that are not.
        lengths: the lengths of all that are not; None: they were not rendered.
        ends: the ids that end answers, with the number of documents.
    """

    kind: str = "conversations"
    count: int = 0
    repeats: Repeats = field(default_factory=Repeats)
    problems: list[DataError] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    lengths: Report | None = None
    ends: Counter[int] = field(default_factory=Counter)

    def add(self, record: Record) -> None:
        """Count a record."""
        self.count += 1
        if isinstance(record.value, dict):
            self.repeats.add_value(record.value)


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
    for record in readable_records(source, findings.problems):
        findings.add(record)
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
            findings.samples.append(
                Sample(record.place, [(text, "+" if is_trained else "") for text, is_trained in parts])
            )
    if not (findings.count or findings.problems):
        raise DataError(f"there is no record in {source}", expected="at least one conversation")
    findings.lengths = None if renderer is None else lengths.report()
    return findings


def readable_records(source: str, problems: list[DataError]) -> Iterator[Record]:
    """Yield the records of a source up to where a file cannot be read on, which is a problem itself.

    Args:
        source: a file, a glob, or a directory of datasets.save_to_disk.
        problems: the list that gets that problem.

    Raises:
        DataError: there is no such file.
    """
    record_files(source)  # a source that is not there, or of another kind, is no problem of a record
    try:
        yield from read_records(source)
    except DataError as error:
        problems.append(error)
