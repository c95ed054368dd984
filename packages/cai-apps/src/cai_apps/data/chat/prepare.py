"""Renders a source of conversations once into files that every rank maps into memory.

    <cache>/<key>/tokenizer/        the HF tokenizer directory that made the ids
    <cache>/<key>/*.bin             the documents, as `cai_apps.data.documents` has them
    <cache>/<key>/documents.json    what `Documents` says of them
    <cache>/<key>/lengths.json      what `LengthReport` says of them

The key is a digest of all that the files depend on: the bytes of the source, the tokenizer's rules, the template's
text, what is trained on, and where conversations are cut.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cai_apps.data.chat import readers
from cai_apps.data.chat.lengths import LengthReport, Lengths
from cai_apps.data.chat.messages import Conversation, read_conversation
from cai_apps.data.chat.readers import read_records
from cai_apps.data.chat.render import Example, Renderer, check_trained
from cai_apps.data.chat.template import DEFAULT, load_template
from cai_apps.data.chat.tokenizer import train_chat_tokenizer
from cai_apps.data.documents import (
    TOKENIZER,
    Documents,
    describe,
    dtype_of,
    open_documents,
    write_documents,
)
from cai_apps.data.prepare import check_ids
from cai_apps.data.records import Record
from cai_apps.data.sealed import key_of, open_or_make
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer, tokenizer_digest
from cai_mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
LENGTHS = "lengths.json"


def prepare_chat(data: Data, vocab_size: int, tokenizer: Path | None = None) -> Documents:
    """Render the conversations of a source, unless the cache already holds what comes of them.

    Args:
        data: the source, the tokenizer, the template, what is trained on and where conversations are cut.
        vocab_size: rows of the model's embedding.
        tokenizer: the directory of the model's tokenizer, in place of `data.tokenizer`.

    Raises:
        ConfigError: there is no tokenizer or template that can be used, or the cache is another user's.
        DataError: the source is missing, or a record is broken: the first one is named by its line.
    """
    content = readers.content(*data.sources, cache=data.cache)
    rendering = load_rendering(data, vocab_size, content, _conversations(data), tokenizer)
    directory = open_or_make(
        data.cache,
        key_of("chat", FORMAT, rendering.origin, data.sequence_length, vocab_size),
        lambda scratch: _write(scratch, data, rendering, vocab_size),
    )
    return open_documents(directory)


@dataclass(frozen=True)
class Rendering:
    """How the conversations of a source become ids.

    Args:
        tokenizer: the tokenizer, with the template that writes conversations.
        renderer: makes examples of conversations.
        origin: "text", "vocabulary" and "dtype" of `Documents`.
    """

    tokenizer: PreTrainedTokenizerFast
    renderer: Renderer
    origin: Mapping[str, str]


def load_rendering(
    data: Data,
    vocab_size: int,
    content: str,
    conversations: Iterable[Conversation],
    tokenizer: Path | None = None,
) -> Rendering:
    """Return how conversations are rendered.

    Args:
        data: the tokenizer, the template, what is trained on and how much is read.
        vocab_size: rows of the model's embedding.
        content: a digest of the source's bytes, and of how they are read.
        conversations: the texts for a tokenizer that is trained here, read only where `data.tokenizer` asks for it.
        tokenizer: the directory of the model's tokenizer, in place of `data.tokenizer`.

    Raises:
        ConfigError: there is no tokenizer or template that can be used, or the cache is another user's.
        DataError: a record is broken, where a tokenizer is trained.
    """
    trained = check_trained(data.trained)
    place = _tokenizer(data, vocab_size, content, conversations) if tokenizer is None else tokenizer
    loaded = load_tokenizer(place)
    template = load_template(loaded, data.chat_template)
    if data.chat_template is not None:
        loaded.chat_template = template.texts[DEFAULT]  # an export goes on with what it was trained on
    origin = {
        "text": key_of(content, data.limit_bytes, template.digest, trained, data.special_tokens),
        "vocabulary": tokenizer_digest(loaded),
        "dtype": dtype_of(vocab_size),
    }
    return Rendering(loaded, Renderer(loaded, template, trained, data.special_tokens), origin)


def check_first(*sources: str) -> None:
    """Raise DataError where the first record of sources is no conversation; the others are not read."""
    for record in read_records(*sources):
        conversation_of(record)
        return


def _conversations(data: Data) -> Iterator[Conversation]:
    return (conversation_of(record) for record in read_records(*data.sources))


def _tokenizer(
    data: Data, vocab_size: int, content: str, conversations: Iterable[Conversation]
) -> str | Path:
    """Return what names the tokenizer: that which is asked for, or the directory of one trained on the source."""
    if data.tokenizer not in ("train", "auto"):
        return data.tokenizer

    def train(directory: Path) -> None:
        train_chat_tokenizer(conversations, vocab_size).save_pretrained(directory / TOKENIZER)

    return open_or_make(data.cache, key_of("chat", FORMAT, TOKENIZER, content, vocab_size), train) / TOKENIZER


def length_report(documents: Documents) -> LengthReport:
    """Return what was counted when conversations were rendered."""
    return LengthReport(**json.loads((documents.directory / LENGTHS).read_text(encoding="utf-8")))


def conversation_of(record: Record) -> Conversation:
    """Return the conversation of a record.

    Raises:
        DataError: it is none; names the record's place.
    """
    if not isinstance(record.value, dict):
        raise record.value
    with placed(record.place):
        return read_conversation(record.value)


@contextmanager
def listed() -> Iterator[None]:
    """Inside, what is wrong with a record is raised with the command that lists every such record."""
    try:
        yield
    except DataError as error:
        fix = f"{error.fix}; `cai data check` lists every such line".removeprefix("; ")
        raise _changed(error, fix=fix) from None


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Inside, what is wrong with a record is raised with its place before it."""
    try:
        yield
    except DataError as error:
        raise _changed(error, what=f"{place}: {error.what}") from None


def _changed(error: DataError, *, what: str | None = None, fix: str | None = None) -> DataError:
    """Return an error with another beginning or advice."""
    return DataError(
        error.what if what is None else what,
        got=error.got,
        expected=error.expected,
        cause=error.cause,
        fix=error.fix if fix is None else fix,
    )


def _write(directory: Path, data: Data, rendering: Rendering, vocab_size: int) -> None:
    rendering.tokenizer.save_pretrained(directory / TOKENIZER)
    lengths = Lengths(data.sequence_length)

    def documents() -> Iterator[tuple[np.ndarray, np.ndarray]]:
        for example in _examples(data, rendering.renderer):
            check_ids(example.ids, vocab_size)
            shortened = lengths.cut(example)
            if shortened is not None:
                yield shortened.ids, shortened.trained

    count, tokens = write_documents(directory, documents(), rendering.origin["dtype"])
    report = lengths.report()
    if count == 0:
        raise DataError(
            f"there is no conversation to train on: {', '.join(data.sources)}",
            got="\n            ".join(report.lines()),
            expected="at least one",
            fix="increase data.sequence_length" if report.count else "",
        )
    describe(directory, rendering.origin, count, tokens, rendering.tokenizer.eos_token_id)
    (directory / LENGTHS).write_text(json.dumps(report.facts()), encoding="utf-8")


def _examples(data: Data, renderer: Renderer) -> Iterator[Example]:
    """Yield the examples of a source, of conversations within the bytes that are read."""
    remaining = data.limit_bytes
    for record in read_records(*data.sources):
        with listed():
            conversation = conversation_of(record)
            with placed(record.place):
                example = renderer.render(conversation)
        if remaining is not None:
            remaining -= sum(len(message.content.encode()) for message in conversation.messages)
            if remaining < 0:
                return
        yield example
