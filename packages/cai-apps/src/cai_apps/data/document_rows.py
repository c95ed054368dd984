"""Rows of several documents each: what a batch says of their boundaries, and the documents that are held out."""

from __future__ import annotations

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
        shape, most = (len(indices), self.length), self.documents
        batch = {
            "input_ids": np.full(shape, self.source.end_of_text, dtype=np.int64),
            "labels": np.full(shape, IGNORED, dtype=np.int64),
            "position_ids": np.zeros(shape, dtype=np.int64),
            "cu_seqlens": np.full((len(indices), most + 1), self.length, dtype=np.int32),
        }
        for row, index in enumerate(indices.tolist()):
            at = 0
            for number, piece in enumerate(self.order[self.rows_at[index] : self.rows_at[index + 1]]):
                batch["cu_seqlens"][row, number] = at
                at = self._put(batch, row, at, int(piece))
            if at < self.length:
                batch["cu_seqlens"][row, self.rows_at[index + 1] - self.rows_at[index]] = at
                batch["position_ids"][row, at:] = np.arange(self.length - at)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _put(self, batch: dict[str, np.ndarray], row: int, at: int, piece: int) -> int:
        """Write a piece at a place of a row; return the place after it."""
        first, size = int(self.first[piece]), int(self.sizes[piece])
        ids, end = self._stream[first : first + size + 1], at + size
        batch["input_ids"][row, at:end] = ids[:size]
        batch["position_ids"][row, at:end] = np.arange(size)
        labelled = size - 1 if self.last[piece] else size
        labels = ids[1 : labelled + 1].astype(np.int64)
        if self._trained is not None:
            labels = np.where(self._trained[first + 1 : first + labelled + 1], labels, IGNORED)
        batch["labels"][row, at : at + labelled] = labels
        return end


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
    held_out = max(1, round(count * validation_fraction)) if validation_fraction > 0 else 0
    if count <= held_out:
        raise DataError(
            "the dataset is too small to train on",
            got=f"{count} documents",
            expected=f"more than {held_out}",
            fix="use more documents, or data.validation_fraction = 0",
        )
    order = permute(np.arange(count), count, seed=0, epoch=0)
    training = DocumentRows.of(source, np.sort(order[held_out:]), length)
    if not held_out:
        return training, None
    return training, DocumentRows.of(source, np.sort(order[:held_out]), length)
