"""Rows of several documents each: what a batch says of their boundaries, and the documents that are held out."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.documents import Documents
from cai_apps.data.packed import IGNORED
from cai_apps.data.packing import best_fit, cut
from cai_apps.data.shuffle import permute
from cai_mesh.errors import DataError

Piece = tuple[np.ndarray, np.ndarray]
"""The ids of a document or a part of one, int [n], and the labels of all of them or of all but the last, int64."""


@dataclass(frozen=True)
class DocumentRows:
    """Rows of `length` tokens, each of one or more documents or pieces of long ones.

    Args:
        source: the documents.
        length: tokens of a row.
        first: the first place of each piece in the stream, int64 [pieces].
        sizes: tokens of each piece, int64 [pieces].
        last: whether a piece ends its document, bool [pieces].
        order: the pieces row by row, int64 [pieces].
        rows_at: the first place of each row in `order`, int64 [rows + 1].
    """

    source: Documents
    length: int
    first: np.ndarray
    sizes: np.ndarray
    last: np.ndarray
    order: np.ndarray
    rows_at: np.ndarray

    @classmethod
    def of(cls, source: Documents, documents: np.ndarray, length: int) -> DocumentRows:
        """Pack some documents, by number."""
        starts = source.starts()
        sizes = np.diff(starts)[documents]
        first, piece_sizes = cut(np.concatenate([[0], np.cumsum(sizes)]), length)
        owner = np.repeat(np.arange(len(sizes)), -(-sizes // length))
        within = first - (np.cumsum(sizes) - sizes)[owner]
        order, rows_at = best_fit(piece_sizes, length)
        last = within + piece_sizes == sizes[owner]
        return cls(source, length, starts[documents][owner] + within, piece_sizes, last, order, rows_at)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.rows_at) - 1

    @cached_property
    def documents(self) -> int:
        """The most documents that a row has, what fills it among them."""
        used = np.add.reduceat(self.sizes[self.order], self.rows_at[:-1])
        return int((np.diff(self.rows_at) + (used < self.length)).max())

    @property
    def filled(self) -> float:
        """The part of all rows that documents take."""
        return float(self.sizes.sum()) / (self.size * self.length)

    @cached_property
    def _stream(self) -> np.ndarray:
        return self.source.stream()

    @cached_property
    def _trained(self) -> np.ndarray | None:
        return self.source.marks()

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return rows by number, all int64 [n, length] but for the boundaries.

        `labels` are those of the place they stand at: the next token of the document, -100 where there is none or it is
        not learned. `position_ids` restart with every document; `cu_seqlens`, int32 [n, documents + 1], says where
        documents begin. What fills a row is a document without labels. Nothing is random, `positions` not used.
        """
        batch = empty_rows(len(indices), self.length, self.documents, self.source.end_of_text)
        for row, index in enumerate(indices.tolist()):
            pieces = self.order[self.rows_at[index] : self.rows_at[index + 1]]
            write_row(batch, row, (self._piece(int(piece)) for piece in pieces))
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _piece(self, piece: int) -> Piece:
        first, size = int(self.first[piece]), int(self.sizes[piece])
        labelled = size - 1 if self.last[piece] else size
        ids = self._stream[first : first + labelled + 1]
        trained = None if self._trained is None else self._trained[first : first + labelled + 1]
        return ids[:size], next_tokens(ids, trained)


def next_tokens(ids: np.ndarray, trained: np.ndarray | None) -> np.ndarray:
    """Return the labels of all ids but the last: the next one each, -100 where that is not trained on, int64 [n - 1].

    Args:
        ids: int [n].
        trained: marks of those that are trained on, bool [n]; None: all are.
    """
    labels = ids[1:].astype(np.int64)
    return labels if trained is None else np.where(trained[1:], labels, IGNORED)


def empty_rows(count: int, length: int, documents: int, end_of_text: int) -> dict[str, np.ndarray]:
    """Return rows without a document, for `write_row` to fill.

    Args:
        count: the number of rows.
        length: tokens of a row.
        documents: the most documents of a row, what fills it among them.
        end_of_text: the id that fills a row.
    """
    return {
        "input_ids": np.full((count, length), end_of_text, dtype=np.int64),
        "labels": np.full((count, length), IGNORED, dtype=np.int64),
        "position_ids": np.zeros((count, length), dtype=np.int64),
        "cu_seqlens": np.full((count, documents + 1), length, dtype=np.int32),
    }


def write_row(batch: dict[str, np.ndarray], row: int, pieces: Iterable[Piece]) -> None:
    """Write documents into a row, one after the other, and after them the positions of what fills it.

    Args:
        batch: the arrays of `empty_rows`.
        row: the number of the row.
        pieces: the ids of each document, and its first labels.
    """
    at, number, length = 0, 0, batch["input_ids"].shape[1]
    for number, (ids, labels) in enumerate(pieces, start=1):
        end = at + len(ids)
        batch["cu_seqlens"][row, number - 1] = at
        batch["input_ids"][row, at:end] = ids
        batch["position_ids"][row, at:end] = np.arange(len(ids))
        batch["labels"][row, at : at + len(labels)] = labels
        at = end
    if at < length:
        batch["cu_seqlens"][row, number] = at
        batch["position_ids"][row, at:] = np.arange(length - at)


def lengths_of(batch: dict[str, Tensor]) -> np.ndarray:
    """Return the lengths of all documents of a batch, int64; its rows are one each where nothing says of others."""
    rows, length = batch["input_ids"].shape
    if "cu_seqlens" not in batch:
        return np.full(rows, length)
    return np.diff(batch["cu_seqlens"].numpy().astype(np.int64)).ravel()


def split_documents(
    source: Documents, length: int, validation_fraction: float
) -> tuple[DocumentRows, DocumentRows | None]:
    """The rows of documents that are trained on, and of those kept for validation: one at least, None for none.

    The documents that are kept are spread over the source, and the same for every run on it.

    Raises:
        DataError: nothing is left to train on.
    """
    count = len(source.starts()) - 1
    training, validation = divide(count, validation_fraction, "documents")
    rows = DocumentRows.of(source, training, length)
    return rows, None if validation is None else DocumentRows.of(source, validation, length)


def divide(count: int, validation_fraction: float, noun: str) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the numbers that are trained on, and those kept for validation, in their order, int64; None: none are.

    Args:
        count: the number of all of them.
        validation_fraction: the part of them that is kept: one at least, where it is not 0.
        noun: the name by which an error calls them.

    Raises:
        DataError: nothing is left to train on.
    """
    held_out = max(1, round(count * validation_fraction)) if validation_fraction > 0 else 0
    if count <= held_out:
        raise DataError(
            "the dataset is too small to train on",
            got=f"{count} {noun}",
            expected=f"more than {held_out}",
            fix=f"use more {noun}, or data.validation_fraction = 0",
        )
    order = permute(np.arange(count), count, seed=0, epoch=0)
    return np.sort(order[held_out:]), np.sort(order[:held_out]) if held_out else None
