"""Renders a source of preferences once into files that every rank maps into memory.

    <cache>/<key>/tokenizer/          the HF tokenizer directory that made the ids
    <cache>/<key>/*.bin               the documents, as `cai_apps.data.documents` has them: two of each unit
    <cache>/<key>/documents.json      what `Documents` says of them
    <cache>/<key>/margins.bin         the margin of each pair, float32, 0 where there is none
    <cache>/<key>/desirable.bin       for each judged answer a byte, 1 where it is desirable
    <cache>/<key>/preferences.json    what `PreferenceReport` says of them

A unit is a pair (chosen, rejected) or a judged answer (the record, and its prompt with the answer to another prompt).
The key is a digest of all that the files depend on, as for conversations.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cai_apps.data.chat.messages import Conversation
from cai_apps.data.chat.prepare import Rendering, listed, load_rendering, placed
from cai_apps.data.chat.render import ALL, Example, Renderer
from cai_apps.data.documents import TOKENIZER, Documents, describe, open_documents, write_documents
from cai_apps.data.preference import sources
from cai_apps.data.preference.lengths import PreferenceLengths
from cai_apps.data.preference.records import Judged, Kind, Messages, Pair
from cai_apps.data.preference.render import render_judged, render_pair
from cai_apps.data.preference.sources import Placed, judged_answers, with_others
from cai_apps.data.prepare import check_ids
from cai_apps.data.sealed import key_of, open_or_make
from cai_apps.data.section import Data
from cai_mesh.errors import ConfigError, DataError

FORMAT = 1
MARGINS, DESIRABLE, REPORT = "margins.bin", "desirable.bin", "preferences.json"
Unit = tuple[Example, Example, float]
"""The two documents of a unit, and the pair's margin or 1.0 for a desirable answer."""


@dataclass(frozen=True)
class Preferences:
    """Tokenized preferences on disk.

    Args:
        documents: chosen_0, rejected_0, chosen_1, rejected_1, ... of pairs; record_0, other_0, record_1, other_1, ...
            of judged answers, where an other is the record's prompt with the answer to another prompt.
        kind: "pairs" or "judged".
    """

    documents: Documents
    kind: Kind

    @property
    def units(self) -> int:
        """The number of pairs or of judged answers."""
        return self.documents.count // 2

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer that made the ids."""
        return self.documents.tokenizer

    @property
    def vocabulary(self) -> str:
        """The digest of the tokenizer's rules."""
        return self.documents.vocabulary

    @property
    def text(self) -> str:
        """The digest of the source's bytes, and of how they are read."""
        return self.documents.text

    @property
    def tokens(self) -> int:
        """The number of ids of all documents."""
        return self.documents.tokens

    @property
    def facts(self) -> dict[str, Any]:
        """The numbers of `PreferenceReport` by name."""
        return json.loads((self.documents.directory / REPORT).read_text(encoding="utf-8"))

    def margins(self) -> np.ndarray:
        """Return by how much each chosen answer is better, float32 [units]; 0 where it is not said."""
        if self.kind == "judged":
            return np.zeros(self.units, dtype=np.float32)
        return np.fromfile(self.documents.directory / MARGINS, dtype=np.float32)

    def desirable(self) -> np.ndarray:
        """Return whether each answer is desirable, bool [units]; of pairs, the chosen answer is."""
        if self.kind == "pairs":
            return np.ones(self.units, dtype=np.bool_)
        return np.fromfile(self.documents.directory / DESIRABLE, dtype=np.bool_)


def prepare_preferences(
    data: Data, kind: Kind, vocab_size: int, tokenizer: Path | None = None
) -> Preferences:
    """Render the preferences of a source, unless the cache already holds what comes of them.

    Args:
        data: the source, the tokenizer, the template, and the length beyond which a unit is left out.
        kind: "pairs", or "judged" for answers with a label; a pair is two of those.
        vocab_size: rows of the model's embedding.
        tokenizer: the directory of the model's tokenizer, in place of `data.tokenizer`.

    Raises:
        ConfigError: there is no tokenizer or template that can be used, `data.trained` names other messages than
            answers, or the cache is another user's.
        DataError: the source is missing, a record is broken (the first one is named by its line) or no pair where
            pairs are asked for, all judged answers have one prompt, or nothing is short enough.
    """
    check_scored(data.trained)
    content = key_of("preferences", kind, sources.content(*data.sources, cache=data.cache))
    rendering = load_rendering(data, vocab_size, content, _conversations(data), tokenizer)
    directory = open_or_make(
        data.cache,
        key_of("preferences", FORMAT, rendering.origin, data.sequence_length, vocab_size),
        lambda scratch: _write(scratch, data, kind, rendering, vocab_size),
    )
    return Preferences(open_documents(directory), kind)


def check_scored(trained: Sequence[str]) -> None:
    """Raise ConfigError where `data.trained` names something else than all answers.

    Args:
        trained: the value of `data.trained`.
    """
    if tuple(trained) != (ALL,):
        raise ConfigError(
            "data.trained names other messages than the answers",
            got=", ".join(trained) or "nothing",
            expected=repr(ALL),
            cause="of a preference all of both answers is scored, and nothing of the prompt",
            fix=f'data.trained = ["{ALL}"]',
        )


def _conversations(data: Data) -> Iterator[Conversation]:
    """Yield each message of a source once, for a tokenizer that is trained on it."""
    for record in sources.read_records(*data.sources):
        with listed():
            preference = sources.preference_of(record)
        if isinstance(preference, Pair):
            yield Conversation((*preference.prompt, *preference.chosen, *preference.rejected))
        else:
            yield Conversation((*preference.prompt, *preference.completion))


def _write(directory: Path, data: Data, kind: Kind, rendering: Rendering, vocab_size: int) -> None:
    rendering.tokenizer.save_pretrained(directory / TOKENIZER)
    lengths = PreferenceLengths(kind, data.sequence_length)
    numbers: list[float] = []

    def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for first, second, number in _units(_read(data, kind), kind, rendering.renderer, lengths):
            numbers.append(number)
            for document in (first, second):
                check_ids(document.ids, vocab_size)
                yield document.ids, document.trained

    count, tokens = write_documents(directory, documents(), rendering.origin["dtype"])
    report = lengths.report()
    if count == 0:
        is_long = report.left_out > 0
        raise DataError(
            f"there is no preference to train on: {', '.join(data.sources)}",
            got="\n            ".join(report.lines()),
            expected="at least one",
            fix=f"increase data.sequence_length = {data.sequence_length}"
            if is_long
            else "use another source",
        )
    describe(directory, rendering.origin, count, tokens, rendering.tokenizer.eos_token_id)
    name, dtype = (MARGINS, np.float32) if kind == "pairs" else (DESIRABLE, np.bool_)
    np.array(numbers, dtype=dtype).tofile(directory / name)
    (directory / REPORT).write_text(json.dumps(report.facts()), encoding="utf-8")


def _units(
    preferences: Iterable[Placed], kind: Kind, renderer: Renderer, lengths: PreferenceLengths
) -> Iterator[Unit]:
    """Yield the units that are short enough."""
    if kind == "pairs":
        for place, pair in preferences:
            assert isinstance(pair, Pair)
            with listed(), placed(place):
                example = render_pair(renderer, pair)
            if lengths.fits(example):
                yield example.chosen, example.rejected, pair.margin or 0.0
        return
    for place, judged, other in with_others(judged_answers(preferences)):
        with listed(), placed(place):
            record, mismatched = (
                render_judged(renderer, judged, completion) for completion in (None, other.completion)
            )
        if lengths.fits(record, mismatched):
            yield record, mismatched, float(judged.desirable)


def _read(data: Data, kind: Kind) -> Iterator[Placed]:
    """Yield the preferences of a source within the bytes that are read."""
    remaining = data.limit_bytes
    for record in sources.read_records(*data.sources):
        with listed():
            preference = sources.preference_of(record)
        sources.check_kind(preference, kind, record.place)
        if remaining is not None:
            remaining -= _bytes(preference)
            if remaining < 0:
                return
        yield record.place, preference


def _bytes(preference: Pair | Judged) -> int:
    """Return the bytes of text of a preference."""
    pair = isinstance(preference, Pair)
    answers: tuple[Messages, ...] = (
        (preference.chosen, preference.rejected) if pair else (preference.completion,)
    )
    parts = (preference.prompt, *answers)
    return sum(len(message.content.encode()) for messages in parts for message in messages)
