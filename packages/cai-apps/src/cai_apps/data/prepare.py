"""Tokenizes a source once into files that every rank maps into memory.

    <cache>/<key>/tokenizer/      the HF tokenizer directory that made the ids
    <cache>/<key>/*.bin           the documents, as `cai_apps.data.documents` has them
    <cache>/<key>/documents.json  dtype, number of tokens, and what they were made of
    <cache>/<key>/files.json      sizes and digests of all these, written last

The key is a digest of the content of everything the files depend on: the bytes of the source, the tokenizer's rules.
So a finished directory is never out of date, wherever the source lies and whatever the tokenizer is called. It is
written under a temporary name and renamed; of two writers one wins and both have the same result. Every opening
compares the files with their digests; what is damaged is made anew. A tokenizer that is trained here has a directory
of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from cai_apps.data import sources
from cai_apps.data.documents import (
    TOKENIZER,
    Documents,
    describe,
    dtype_of,
    open_documents,
    write_documents,
)
from cai_apps.data.sealed import key_of, open_or_make
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import (
    SpecialTokens,
    document_ids,
    load_tokenizer,
    tokenizer_digest,
    train_tokenizer,
)
from cai_mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 4
DOCUMENTS_AT_ONCE = 64


def prepare(data: Data, vocab_size: int, tokenizer: Path | None = None) -> Documents:
    """Train or load the tokenizer and tokenize the source, unless the cache already holds what comes of it.

    Args:
        data: the source, the tokenizer and how text is read.
        vocab_size: rows of the model's embedding.
        tokenizer: the directory of the tokenizer of a run that goes on, in place of `data.tokenizer`.

    Raises:
        ConfigError: the cache is another user's, or others may write there; or the tokenizer cannot be trained or
            loaded.
        DataError: the source is missing, empty or broken, or the tokenizer has ids the model has no row for.
    """
    text = key_of(text_content(data), data.limit_bytes)
    loaded = load_tokenizer(_tokenizer(data, vocab_size, text) if tokenizer is None else tokenizer)
    vocabulary, dtype = tokenizer_digest(loaded), dtype_of(vocab_size)
    origin = {"text": text, "vocabulary": vocabulary, "dtype": dtype}
    directory = open_or_make(
        data.cache,
        key_of(FORMAT, origin, data.special_tokens, vocab_size),
        lambda scratch: _write(scratch, data, loaded, vocab_size, origin),
    )
    return open_documents(directory)


def texts_of(data: Data, on_null: Callable[[str], None] | None = None) -> Iterator[str]:
    """Yield the documents that a section asks for; `on_null` is called with the place of each record without a text."""
    options = {"column": data.text_column, "limit_bytes": data.limit_bytes, "on_null": on_null}
    return sources.documents(*data.sources, **options)


def text_content(data: Data) -> str:
    """Return a digest of the bytes that a section's documents are read from."""
    return sources.content(*data.sources, cache=data.cache, column=data.text_column)


def _tokenizer(data: Data, vocab_size: int, text: str) -> str | Path:
    """Return what names the tokenizer: that which is asked for, or the directory of one trained on the source."""
    if data.tokenizer not in ("train", "auto"):
        return data.tokenizer

    def train(directory: Path) -> None:
        trained = train_tokenizer(texts_of(data), vocab_size)
        trained.save_pretrained(directory / TOKENIZER)

    return open_or_make(data.cache, key_of(FORMAT, TOKENIZER, text, vocab_size), train) / TOKENIZER


def _write(
    directory: Path, data: Data, tokenizer: PreTrainedTokenizerFast, vocab_size: int, origin: dict[str, str]
) -> None:
    tokenizer.save_pretrained(directory / TOKENIZER)
    nulls: list[str] = []
    texts = texts_of(data, nulls.append)

    def checked() -> Iterator[tuple[np.ndarray, None]]:
        for ids in tokenize(tokenizer, texts, data.special_tokens):
            check_ids(ids, vocab_size)
            yield ids, None

    count, tokens = write_documents(directory, checked(), origin["dtype"])
    if nulls:
        print(f"records without a text are passed over: {len(nulls)}, the first is {nulls[0]}", flush=True)
    if tokens == 0:
        raise DataError(
            f"the dataset is empty: {', '.join(data.sources)}", got="no token", expected="some text"
        )
    describe(directory, origin, count, tokens, tokenizer.eos_token_id)


def tokenize(
    tokenizer: PreTrainedTokenizerFast, documents: Iterable[str], special_tokens: SpecialTokens = "text"
) -> Iterator[np.ndarray]:
    """Yield the ids of each document, int64, as `document_ids` has them."""
    documents = iter(documents)
    while batch := list(islice(documents, DOCUMENTS_AT_ONCE)):
        for ids in document_ids(tokenizer, batch, special_tokens):
            yield np.array(ids, dtype=np.int64)


def check_ids(ids: np.ndarray, vocab_size: int) -> None:
    """Raises DataError when a token id has no row in an embedding of `vocab_size` rows."""
    largest = int(ids.max(initial=0))
    if largest >= vocab_size:
        raise DataError(
            "token id beyond the model's vocabulary",
            got=f"id {largest}",
            expected=f"ids below vocab_size = {vocab_size}",
            cause="the tokenizer was made for another model",
            fix='use the model\'s own tokenizer, or data.tokenizer = "train"',
        )
