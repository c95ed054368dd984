"""Rows of several pairs or judged answers each, whole: what a batch says of their documents, labels and margins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.document_rows import Piece, divide, empty_rows, next_tokens, write_row
from cai_apps.data.packed import IGNORED
from cai_apps.data.packing import best_fit
from cai_apps.data.preference.prepare import Preferences
from cai_mesh.errors import DataError

NOBODY = -1
"""The number of a unit where a row has none."""
OTHER = "kl_"
"""What the names of a batch begin with that are of the judged answers' other documents."""


@dataclass(frozen=True)
class PreferenceRows:
    """Rows of `length` tokens, each of one or more units: pairs, or judged answers.

    Args:
        source: the preferences.
        length: tokens of a row.
        order: the numbers of the units, row by row, int64 [units].
        rows_at: the first place of each row in `order`, int64 [rows + 1].
        reference: the log-probability of each document's scored tokens under a reference model, float64
            [documents of the source]; None: the rows say nothing of it.
    """

    source: Preferences
    length: int
    order: np.ndarray
    rows_at: np.ndarray
    reference: np.ndarray | None = None

    @classmethod
    def of(cls, source: Preferences, units: np.ndarray, length: int) -> PreferenceRows:
        """Pack some units, by number, int64 [units].

        Raises:
            DataError: a unit is longer than a row.
        """
        both = source.documents.lengths().reshape(-1, 2)[units]
        sizes = both.sum(axis=1) if source.kind == "pairs" else both.max(axis=1)
        if sizes.max(initial=0) > length:
            raise DataError(
                "a row is too short for a unit of the preferences",
                got=f"{int(sizes.max())} tokens",
                expected=f"at most {length}",
                fix="use the data.sequence_length that the preferences were prepared with",
            )
        order, rows_at = best_fit(sizes, length)
        return cls(source, length, units[order], rows_at)

    @property
    def size(self) -> int:
        """The number of rows."""
        return len(self.rows_at) - 1

    @cached_property
    def units(self) -> int:
        """The most units that a row has, U."""
        return int(np.diff(self.rows_at).max())

    @property
    def is_paired(self) -> bool:
        """Whether the units are pairs."""
        return self.source.kind == "pairs"

    @property
    def documents(self) -> int:
        """The most documents that a row has, what fills it among them, D: 2 U + 1 of pairs, U + 1 of judged answers."""
        return (2 * self.units if self.is_paired else self.units) + 1

    @property
    def filled(self) -> float:
        """The part of all rows that documents take; of judged answers, those with the records."""
        lengths = self.source.documents.lengths().reshape(-1, 2)[self.order]
        tokens = lengths.sum() if self.is_paired else lengths[:, 0].sum()
        return float(tokens) / (self.size * self.length)

    def __getstate__(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @cached_property
    def _stream(self) -> np.ndarray:
        return self.source.documents.stream()

    @cached_property
    def _starts(self) -> np.ndarray:
        return np.asarray(self.source.documents.starts())

    @cached_property
    def _trained(self) -> np.ndarray | None:
        return self.source.documents.marks()

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The margin of each pair, or which judged answers are desirable."""
        return self.source.margins() if self.is_paired else self.source.desirable()

    def rows(self, indices: np.ndarray, positions: np.ndarray) -> dict[str, Tensor]:
        """Return rows by number; S is `length`, U the most units of any row, D the most documents.

        "input_ids", "labels" and "position_ids" are int64 [n, S]. Labels are those of the place they stand at: the next
        token of the document, -100 where there is none or it is not scored. "cu_seqlens", int32 [n, D + 1], says where
        documents begin: of pairs D is 2 U + 1, and documents 2u and 2u + 1 are chosen and rejected of unit u; of judged
        answers D is U + 1, and document u is the record. What fills a row is the document after them; those that a row
        has not begin at S.

        "scored", int64 [n, K], are the places with a label, K the most of any row asked for; other rows have the last
        place of a row after them, which never has one.

        "number", int64 [n, U], is each unit's number in the source, -1 where a row has none, and "present", bool
        [n, U], says whether it has one. Of pairs there is "margin", float32 [n, U]; of judged answers "desirable", bool
        [n, U], and "kl_input_ids", "kl_labels", "kl_position_ids", "kl_cu_seqlens" and "kl_scored" as above, whose
        document u is the other one of unit u.

        Where `reference` is set, "reference", float64 [n, D - 1], has its values for the documents, 0 where a row has
        none, and "kl_reference", float64 [n, U], those of the others. Nothing is random, `positions` not used.
        """
        units = np.full((len(indices), self.units), NOBODY, dtype=np.int64)
        for row, index in enumerate(indices.tolist()):
            numbers = self.order[self.rows_at[index] : self.rows_at[index + 1]]
            units[row, : len(numbers)] = numbers
        present = units != NOBODY
        batch = {"number": units, "present": present}
        batch["margin" if self.is_paired else "desirable"] = np.where(
            present, self._numbers[units], self._numbers.dtype.type(0)
        )
        if self.is_paired:
            first = np.where(present, 2 * units, NOBODY)
            documents = np.stack([first, np.where(present, first + 1, NOBODY)], axis=-1)
            batch |= self._written(documents.reshape(len(indices), -1), "")
        else:
            batch |= self._written(np.where(present, 2 * units, NOBODY), "")
            batch |= self._written(np.where(present, 2 * units + 1, NOBODY), OTHER)
        return {name: torch.from_numpy(values) for name, values in batch.items()}

    def _written(self, documents: np.ndarray, beginning: str) -> dict[str, np.ndarray]:
        """Return rows with some documents written into them, by names with a beginning.

        Args:
            documents: the number of each document, -1 after the last of a row, int64 [n, D - 1].
            beginning: the first letters of the names.
        """
        batch = empty_rows(len(documents), self.length, self.documents, self.source.documents.end_of_text)
        for row, numbers in enumerate(documents):
            write_row(batch, row, self._pieces(numbers[numbers != NOBODY]))
        batch["scored"] = places_of(batch["labels"])
        if self.reference is not None:
            batch["reference"] = np.where(documents == NOBODY, 0.0, self.reference[documents])
        return {beginning + name: values for name, values in batch.items()}

    def _pieces(self, documents: np.ndarray) -> Iterable[Piece]:
        for number in documents.tolist():
            start, end = self._starts[number], self._starts[number + 1]
            ids = self._stream[start:end]
            yield ids, next_tokens(ids, None if self._trained is None else self._trained[start:end])


def places_of(labels: np.ndarray) -> np.ndarray:
    """Return the places with a label of each row, int64 [n, K]; K is the most of any row, the last place fills up.

    Args:
        labels: int64 [n, S], -100 at the last place and wherever there is none.
    """
    rows, places = np.nonzero(labels != IGNORED)
    counts = np.bincount(rows, minlength=len(labels))
    filled = np.full((len(labels), counts.max(initial=0)), labels.shape[1] - 1, dtype=np.int64)
    filled[np.arange(filled.shape[1]) < counts[:, None]] = places
    return filled


def split_preferences(
    preferences: Preferences, length: int, validation_fraction: float
) -> tuple[PreferenceRows, PreferenceRows | None]:
    """Return the rows of units that are trained on, and of those kept for validation: one at least, None for none.

    The units that are kept are spread over the source, and the same for every run on it.

    Args:
        preferences: the units.
        length: tokens of a row.
        validation_fraction: the part of the units that is kept.

    Raises:
        DataError: nothing is left to train on, or a unit is longer than a row.
    """
    noun = "pairs" if preferences.kind == "pairs" else "judged answers"
    training, validation = divide(preferences.units, validation_fraction, noun)
    rows = PreferenceRows.of(preferences, training, length)
    return rows, None if validation is None else PreferenceRows.of(preferences, validation, length)


def blank(rows: dict[str, Tensor], missing: Tensor) -> dict[str, Tensor]:
    """Return rows, of which those that are marked (bool [n]) have no unit and no target."""
    column = missing[:, None]
    labels = {
        name: rows[name].masked_fill(column, IGNORED) for name in ("labels", OTHER + "labels") if name in rows
    }
    return (
        rows
        | labels
        | {
            "present": rows["present"] & ~column,
            "number": rows["number"].masked_fill(column, NOBODY),
        }
    )
