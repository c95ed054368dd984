"""Text that is tokenized while a run goes on: nothing of it is kept, and it may be larger than any disk of a rank's.

A stream is endless: the documents of the sources in their order, mixed by a buffer, and after the last the first again
in another order. Its tokens are cut into rows of one length. Row i is a function of the sources, the tokenizer, the
buffer and the seed alone, so that a run which goes on from a position, on any number of ranks, sees the rows that a run
in one piece sees. To come to a row, those before it are read again.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.documents import TOKENIZER, Documents
from cai_apps.data.packed import next_labels
from cai_apps.data.prepare import check_ids, text_content, texts_of, tokenize
from cai_apps.data.sealed import key_of, open_or_make
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer, tokenizer_digest
from cai_mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 1
ENDLESS = 2**62
"""The number of rows that a stream says it has."""


@dataclass(frozen=True)
class TextStream:
    """A source of text that is read while a run goes on.

    Args:
        directory: the directory of the tokenizer.
        data: the section that names the source.
        text: digest of the source's bytes, and of how they are read.
        vocabulary: digest of the tokenizer's rules.
        rows_of_model: rows of the model's embedding.
        held_out: documents for validation; None: there are none.
    """

    directory: Path
    data: Data
    text: str
    vocabulary: str
    rows_of_model: int
    held_out: Documents | None = None

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer."""
        return self.directory / TOKENIZER


def prepare_stream(data: Data, vocab_size: int, tokenizer: Path | None = None) -> TextStream:
    """Return a stream, whose sources are digested and whose tokenizer is kept in the cache.

    Args:
        data: the source, the tokenizer and how text is read.
        vocab_size: rows of the model's embedding.
        tokenizer: the directory of the tokenizer of a run that goes on, in place of `data.tokenizer`.

    Raises:
        ConfigError: the cache is another user's, or the tokenizer cannot be loaded.
        DataError: a source is missing, or cannot be read.
    """
    loaded = load_tokenizer(data.tokenizer if tokenizer is None else tokenizer)
    vocabulary = tokenizer_digest(loaded)
    text = key_of("stream", FORMAT, text_content(data), data.limit_bytes, data.shuffle_buffer)
    directory = open_or_make(
        data.cache,
        key_of("stream", FORMAT, vocabulary),
        lambda scratch: keep_tokenizer(loaded, scratch),
    )
    return TextStream(directory, data, text, vocabulary, vocab_size)


def keep_tokenizer(tokenizer: PreTrainedTokenizerFast, directory: Path) -> None:
    """Write a tokenizer into a new directory of the cache."""
    tokenizer.save_pretrained(directory / TOKENIZER)


class StreamRows:
    """The rows of a stream, `cai_apps.data.batches.Samples` that are read in their order.

    Args:
        stream: the stream.
        length: tokens of a row.
        seed: the seed of the order of documents.
    """

    size = ENDLESS

    def __init__(self, stream: TextStream, length: int, seed: int):
        self._stream, self._length, self._seed = stream, length, seed
        self._next, self._rows = 0, self._read()

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return `input_ids` and `labels`, int64 [len(indices), length], as `Split` has them; all rows are full.

        Raises:
            DataError: a source is broken or empty, or the tokenizer has ids that the model has no row for.
        """
        ids = np.stack([self._row(int(index)) for index in indices]).astype(np.int64)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(next_labels(ids))}

    def _row(self, index: int) -> np.ndarray:
        """Return a row; from one that lies before the last, the stream begins anew."""
        if index < self._next:
            self._next, self._rows = 0, self._read()
        for row in self._rows:
            self._next += 1
            if self._next > index:
                return row
        raise AssertionError("a stream is endless")

    def _read(self) -> Iterator[np.ndarray]:
        """Yield the rows of a stream."""
        tokenizer = load_tokenizer(self._stream.tokenizer)
        data = self._stream.data
        rest = np.zeros(0, dtype=np.int64)
        for epoch in count():
            texts = mixed(texts_of(data), data.shuffle_buffer, f"{self._seed} {epoch}")
            size = 0
            for ids in tokenize(tokenizer, texts, data.special_tokens):
                check_ids(ids, self._stream.rows_of_model)
                size += len(ids)
                rest = np.concatenate([rest, ids])
                full = len(rest) // self._length
                yield from rest[: full * self._length].reshape(full, self._length)
                rest = rest[full * self._length :]
            if not size:
                raise DataError(f"the dataset is empty: {', '.join(data.sources)}", expected="some text")


def mixed(texts: Iterable[str], size: int, seed: str) -> Iterator[str]:
    """Yield texts in an order that a buffer of `size` texts makes: one drawn from it goes, the next comes in.

    Args:
        texts: the texts.
        size: the number of texts of the buffer; 1: they keep their order.
        seed: the seed of what is drawn.
    """
    draw, buffer = random.Random(seed), list[str]()
    for text in texts:
        if len(buffer) < size:
            buffer.append(text)
            continue
        place = draw.randrange(size)
        yield buffer[place]
        buffer[place] = text
    if size > 1:
        draw.shuffle(buffer)
    yield from buffer
