"""Tokenized documents in files that every rank maps into memory, with marks of what is trained on.

tokens.bin      the ids of all documents, one after the other, uint16 or uint32
trained.bin     for each a byte, 1 where it is trained on; without this file all are
starts.bin      where each document begins and the last one ends, int64: document i is tokens[starts[i]:starts[i + 1]]
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

TOKENIZER = "tokenizer"
TOKENS, TRAINED, STARTS = "tokens.bin", "trained.bin", "starts.bin"
DESCRIPTION = "documents.json"
"""The name of the file with what `Documents` says of them."""


@dataclass(frozen=True)
class Documents:
    """Tokenized documents on disk.

    Args:
        directory: the directory of their files.
        count: the number of documents.
        tokens: the number of ids of all of them.
        dtype: "uint16" or "uint32".
        end_of_text: the id of the end-of-sequence token.
        text: digest of the source's bytes, and of how they are read.
        vocabulary: digest of the tokenizer's rules.
        held_out: documents for validation that are another source's; None: some of these are held out.
    """

    directory: Path
    count: int
    tokens: int
    dtype: str
    end_of_text: int
    text: str
    vocabulary: str
    held_out: Documents | None = None

    @property
    def tokenizer(self) -> Path:
        """The directory of the tokenizer that made the ids."""
        return self.directory / TOKENIZER

    def stream(self) -> np.ndarray:
        """Return the ids of all documents, [tokens] uint16 or uint32, mapped read-only."""
        return self._tokens

    def starts(self) -> np.ndarray:
        """Return the first place of each document, and the end of the last, int64 [count + 1], mapped read-only."""
        return self._starts

    def marks(self) -> np.ndarray | None:
        """Return which ids are trained on, bool [tokens], mapped read-only; None: all are."""
        return self._trained

    def ids(self, number: int) -> np.ndarray:
        """Return the ids of a document, [n] uint16 or uint32, mapped read-only."""
        return self._tokens[self._starts[number] : self._starts[number + 1]]

    def trained(self, number: int) -> np.ndarray:
        """Return which ids of a document are trained on, bool [n]."""
        start, end = self._starts[number], self._starts[number + 1]
        return np.ones(end - start, dtype=bool) if self._trained is None else self._trained[start:end]

    def lengths(self) -> np.ndarray:
        """Return the number of ids of each document, int64 [count]."""
        return np.diff(self._starts)

    @cached_property
    def _tokens(self) -> np.ndarray:
        return np.memmap(self.directory / TOKENS, dtype=self.dtype, mode="r", shape=(self.tokens,))

    @cached_property
    def _trained(self) -> np.ndarray | None:
        file = self.directory / TRAINED
        return np.memmap(file, dtype=np.bool_, mode="r", shape=(self.tokens,)) if file.exists() else None

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.memmap(self.directory / STARTS, dtype=np.int64, mode="r", shape=(self.count + 1,))


def open_documents(directory: Path) -> Documents:
    """Return the documents that `write_documents` and `describe` have left in a directory."""
    return Documents(directory, **json.loads((directory / DESCRIPTION).read_text(encoding="utf-8")))


def describe(directory: Path, origin: Mapping[str, str], count: int, tokens: int, end_of_text: int) -> None:
    """Write the file of `open_documents`, after the documents."""
    description = {**origin, "count": count, "tokens": tokens, "end_of_text": end_of_text}
    (directory / DESCRIPTION).write_text(json.dumps(description), encoding="utf-8")


def write_documents(
    directory: Path, documents: Iterable[tuple[np.ndarray, np.ndarray | None]], dtype: str
) -> tuple[int, int]:
    """Write documents into a directory; return their number and the number of their ids.

    Args:
        directory: an existing directory.
        documents: the ids of each, int [n], and which are trained on, bool [n]; None in all of them: all are.
        dtype: "uint16" or "uint32".
    """
    count = position = 0
    with ExitStack() as stack:
        tokens, starts = (stack.enter_context((directory / name).open("wb")) for name in (TOKENS, STARTS))
        marks = None
        starts.write(np.int64(0).tobytes())
        for ids, trained in documents:
            if count == 0 and trained is not None:
                marks = stack.enter_context((directory / TRAINED).open("wb"))
            count, position = count + 1, position + len(ids)
            tokens.write(ids.astype(dtype).tobytes())
            starts.write(np.int64(position).tobytes())
            if marks is not None:
                marks.write(trained.astype(np.bool_).tobytes())
    return count, position


def dtype_of(vocab_size: int) -> str:
    """Return the smallest type of ids below a vocabulary's size."""
    return "uint16" if vocab_size <= 2**16 else "uint32"
