"""Packed sequences: a stream of tokens cut into sequences of equal length, the last ones kept for validation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.documents import Documents
from cai_mesh.errors import DataError

IGNORED = -100


@dataclass(frozen=True)
class Split:
    """The sequences [first, first + size) of a tokenized source."""

    prepared: Documents
    sequence_length: int
    first: int
    size: int

    @cached_property
    def _stream(self) -> np.ndarray:
        return self.prepared.stream()

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """`input_ids` and `labels`, int64 [len(indices), sequence_length].

        The source's last sequence may be short: it is filled with end-of-text tokens whose labels are -100.
        `labels` are those of the place they stand at: the next token of the sequence, of which the last has none.
        Nothing is random, `positions` not used.
        """
        length = self.sequence_length
        ids = np.full((len(indices), length), self.prepared.end_of_text, dtype=np.int64)
        labels = np.full((len(indices), length), IGNORED, dtype=np.int64)
        for row, index in enumerate(indices):
            start = (self.first + int(index)) * length
            tokens = self._stream[start : start + length]
            ids[row, : len(tokens)] = tokens
            labels[row, : len(tokens) - 1] = tokens[1:]
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def next_labels(ids: np.ndarray) -> np.ndarray:
    """Return the labels of full rows: the next token each, the last has none, int64 [rows, length]."""
    labels = np.full(ids.shape, IGNORED, dtype=np.int64)
    labels[:, :-1] = ids[:, 1:]
    return labels


def split(prepared: Documents, sequence_length: int, validation_fraction: float) -> tuple[Split, Split]:
    """The training and validation sequences; validation has at least one when its fraction is above 0.

    Raises:
        DataError: nothing is left to train on.
    """
    total = -(-prepared.tokens // sequence_length)
    held_out = max(1, round(total * validation_fraction)) if validation_fraction > 0 else 0
    if total <= held_out:
        raise DataError(
            "the dataset is too small to train on",
            got=f"{prepared.tokens} tokens, {total} sequences of {sequence_length}",
            expected=f"more than {held_out} sequences",
            fix="use more text, a smaller data.sequence_length or data.validation_fraction = 0",
        )
    training = total - held_out
    return (
        Split(prepared, sequence_length, 0, training),
        Split(prepared, sequence_length, training, held_out),
    )


def blank(rows: dict[str, Tensor], missing: Tensor) -> dict[str, Tensor]:
    """Return sequences, of which those that are marked (bool [n]) have no target."""
    return rows | {"labels": rows["labels"].masked_fill(missing[:, None], IGNORED)}


def count_targets(batch: dict[str, Tensor]) -> int:
    """Number of tokens with a loss: labels that are not ignored."""
    return int((batch["labels"] != IGNORED).sum())
