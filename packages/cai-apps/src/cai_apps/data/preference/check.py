"""What is in a file, whichever kind it is of: broken records, a few as they are rendered, and their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cai_apps.data.chat import messages
from cai_apps.data.chat.check import SHOWN, Findings, Mark, Sample, check_source, readable_records
from cai_apps.data.chat.prepare import placed
from cai_apps.data.chat.render import ALL, Example, Renderer
from cai_apps.data.preference import questions, sources
from cai_apps.data.preference.lengths import PreferenceLengths
from cai_apps.data.preference.prepare import check_scored
from cai_apps.data.preference.records import Judged, Kind, Pair, kind_of
from cai_apps.data.preference.render import conversations_of, render_judged, render_pair
from cai_apps.data.preference.sources import Placed, check_kind, judged_answers, preference_of, with_others
from cai_apps.data.records import Record
from cai_mesh.errors import DataError


def check_any(
    source: str, renderer: Renderer | None, length: int | None, trained: Sequence[str] = (ALL,)
) -> Findings:
    """Return what is in a source of conversations, pairs or judged answers: of what its first known record is.

    Args:
        source: a file, a glob, a directory of datasets.save_to_disk, or the name of the pairs that are made here.
        renderer: renders records; None: only their form is looked at.
        length: the most tokens of a conversation, of a judged answer, or of both documents of a pair; None: any.
        trained: the value of `data.trained`.

    Raises:
        ConfigError: the template is broken, or something else than answers is to be trained on of preferences.
        DataError: there is no such file, or nothing in it.
    """
    kind = _kind_of_source(source)
    if kind is None:
        return check_source(source, renderer, length)
    check_scored(trained)
    return _check_preferences(source, kind, renderer, length)


def _kind_of_source(source: str) -> Kind | None:
    """Return the kind of the first record that has a known form; None: conversations, or nothing that is known."""
    for record in _records(source, []):
        if not isinstance(record.value, dict):
            continue
        kind = kind_of(record.value)
        if kind is not None or messages.form_of(record.value) is not None:
            return kind
    return None


def _records(source: str, problems: list[DataError]) -> Iterator[Record]:
    if source == questions.SOURCE:
        return sources.read_records(source)
    return readable_records(source, problems)


def _check_preferences(source: str, kind: Kind, renderer: Renderer | None, length: int | None) -> Findings:
    """Return what is in a source of preferences."""
    findings, lengths = Findings(kind), PreferenceLengths(kind, length)
    preferences = _preferences(source, kind, findings)
    if renderer is None:
        for _ in preferences:
            pass
        return findings
    if kind == "pairs":
        for place, preference in preferences:
            _render(findings, lengths, renderer, place, preference)
    else:
        try:
            for place, judged, other in with_others(judged_answers(preferences)):
                _render(findings, lengths, renderer, place, judged, other)
        except DataError as error:
            findings.problems.append(error)
    findings.lengths = lengths.report()
    return findings


def _preferences(source: str, kind: Kind, findings: Findings) -> Iterator[Placed]:
    """Yield the preferences of a source; the others are problems."""
    for record in _records(source, findings.problems):
        findings.add(record)
        try:
            preference = preference_of(record)
            check_kind(preference, kind, record.place)
        except DataError as error:
            findings.problems.append(error)
            continue
        yield record.place, preference


def _render(
    findings: Findings,
    lengths: PreferenceLengths,
    renderer: Renderer,
    place: str,
    preference: Pair | Judged,
    other: Judged | None = None,
) -> None:
    """Render a preference, and note its length and end, or what is wrong with it."""
    try:
        with placed(place):
            if isinstance(preference, Pair):
                pair = render_pair(renderer, preference)
                documents: list[Example] = [pair.chosen, pair.rejected]
                lengths.fits(pair)
            else:
                documents = [render_judged(renderer, preference)]
                mismatched = None if other is None else render_judged(renderer, preference, other.completion)
                lengths.fits(documents[0], mismatched)
    except DataError as error:
        findings.problems.append(error)
        return
    findings.ends.update(renderer.end_of(document) for document in documents)
    if len(findings.samples) < SHOWN:
        findings.samples.append(Sample(place, _parts(renderer, preference)))


def _parts(renderer: Renderer, preference: Pair | Judged) -> list[tuple[str, Mark]]:
    """Return the prompt's text once, and after it that of each answer, on lines of their own."""
    marks: tuple[Mark, ...] = ("+", "-")
    if isinstance(preference, Judged):
        marks = ("+",) if preference.desirable else ("-",)
    parts: list[tuple[str, Mark]] = []
    for mark, conversation in zip(marks, conversations_of(preference), strict=True):
        texts = renderer.pieces(conversation)[1]
        first = next(number for number, (_, is_scored) in enumerate(texts) if is_scored)
        if not parts:
            parts.extend((text, "") for text, _ in texts[:first])
        elif not parts[-1][0].endswith("\n"):
            parts.append(("\n", ""))
        parts.extend((text, mark if is_scored else "") for text, is_scored in texts[first:])
    return parts
