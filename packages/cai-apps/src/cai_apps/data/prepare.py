"""Tokenizes a source once into files that every rank maps into memory.

    <cache>/<key>/tokenizer/      an HF tokenizer directory, when it was trained here
    <cache>/<key>/tokens.bin      the documents joined by the end-of-sequence token, uint16 or uint32
    <cache>/<key>/dataset.json    dtype and number of tokens
    <cache>/<key>/files.json      sizes and digests of all these, written last

The key is a digest of everything the files depend on, so a finished directory is never out of date. It is
written under a temporary name and renamed; of two writers one wins and both have the same result. Every opening
compares the files with their digests; what is damaged is made anew.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cai_apps.data import sources
from cai_apps.data.sealed import open_or_make
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer, train_tokenizer
from cai_mesh.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

FORMAT = 2
DOCUMENTS_AT_ONCE = 64


@dataclass(frozen=True)
class Prepared:
    """A tokenized source on disk."""

    directory: Path
    tokenizer: str
    """Directory or hub id of the tokenizer."""
    tokens: int
    dtype: str
    end_of_text: int

    def stream(self) -> np.ndarray:
        """All tokens, [tokens] uint16 or uint32, mapped read-only."""
        return np.memmap(self.directory / "tokens.bin", dtype=self.dtype, mode="r", shape=(self.tokens,))


def prepare(data: Data, vocab_size: int) -> Prepared:
    """Trains or loads the tokenizer and tokenizes the source, unless the cache already holds the result.

    Raises:
        ConfigError: the cache is another user's, or others may write there.
        DataError: the source is missing, empty or broken, or the tokenizer has ids the model has no row for.
        ConfigError: the tokenizer cannot be trained or loaded.
    """
    directory = open_or_make(
        data.cache, _key(data, vocab_size), lambda scratch: _write(scratch, data, vocab_size)
    )
    described = json.loads((directory / "dataset.json").read_text(encoding="utf-8"))
    tokenizer = str(directory / "tokenizer") if data.tokenizer == "train" else data.tokenizer
    return Prepared(directory, tokenizer, **described)


def _key(data: Data, vocab_size: int) -> str:
    inputs = {
        "format": FORMAT,
        "source": sources.fingerprint(data.source),
        "tokenizer": data.tokenizer,
        "limit_bytes": data.limit_bytes,
        "vocab_size": vocab_size,
    }
    return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:20]


def _write(directory: Path, data: Data, vocab_size: int) -> None:
    if data.tokenizer == "train":
        tokenizer = train_tokenizer(sources.documents(data.source, limit_bytes=data.limit_bytes), vocab_size)
        tokenizer.save_pretrained(directory / "tokenizer")
    else:
        tokenizer = load_tokenizer(data.tokenizer)
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    count = 0
    with (directory / "tokens.bin").open("wb") as file:
        for ids in tokenize(tokenizer, sources.documents(data.source, limit_bytes=data.limit_bytes)):
            check_ids(ids, vocab_size)
            file.write(ids.astype(dtype).tobytes())
            count += len(ids)
    if count == 0:
        raise DataError(f"the dataset is empty: {data.source}", got="no token", expected="some text")
    description: dict[str, Any] = {"tokens": count, "dtype": dtype, "end_of_text": tokenizer.eos_token_id}
    (directory / "dataset.json").write_text(json.dumps(description), encoding="utf-8")


def tokenize(tokenizer: PreTrainedTokenizerFast, documents: Iterable[str]) -> Iterator[np.ndarray]:
    """int64 token ids of each document, ending with the end-of-sequence token."""
    documents = iter(documents)
    while batch := list(islice(documents, DOCUMENTS_AT_ONCE)):
        for ids in tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)[
            "input_ids"
        ]:
            yield np.array([*ids, tokenizer.eos_token_id], dtype=np.int64)


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
