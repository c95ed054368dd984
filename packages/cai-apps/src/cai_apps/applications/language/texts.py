"""The texts of a run, prepared as its config asks: conversations, documents or a stream, and what is validated on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from cai_apps.data.chat.prepare import prepare_chat
from cai_apps.data.documents import Documents
from cai_apps.data.prepare import prepare
from cai_apps.data.section import Data
from cai_apps.data.streams import TextStream, prepare_stream


def prepared_texts(data: Data, vocab_size: int, tokenizer: Path | None = None) -> Documents | TextStream:
    """Return the texts that a section names, with those of its `validation_source` beside, in the same ids.

    Args:
        data: the section.
        vocab_size: rows of the model's embedding.
        tokenizer: the directory of the tokenizer of a run that goes on, in place of `data.tokenizer`.

    Raises:
        ConfigError: as `prepare`, `prepare_chat` and `prepare_stream` do.
        DataError: likewise, of either source.
    """
    make = prepare_chat if data.format == "chat" else prepare
    prepared = (prepare_stream if data.streaming else make)(data, vocab_size, tokenizer)
    if data.validation_source is None:
        return prepared
    other = replace(data, source=data.validation_source, more_sources=(), limit_bytes=None)
    return replace(prepared, held_out=make(other, vocab_size, prepared.tokenizer))
