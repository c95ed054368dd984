"""Rows of several pairs or judged answers each, whole: what a batch says of their documents, labels and margins."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor

from cai_apps.data.document_rows import Piece, divide, empty_rows, next_tokens, write_row
from cai_apps.data.packed import IGNORED
from cai_apps.data.packing import best_fit
from cai_apps.data.preference.prepare import Preferences
from cai_apps.data.preference.shared import prefixes_of, shared_sizes, write_shared
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
        shared: the number of tokens that both documents of a pair begin with and that are written once, for each unit
            of `order`, int64 [units]; None: both are whole.
    """

    source: Preferences
    length: int
    order: np.ndarray
    rows_at: np.ndarray
    reference: np.ndarray | None = None
    shared: np.ndarray | None = None

    @classmethod
    def of(
        cls, source: Preferences, units: np.ndarray, length: int, *, shares_prompts: bool = False
    ) -> PreferenceRows:
        """Pack some units, by number, int64 [units].

        Args:
            source: the preferences.
            units: the numbers.
            length: tokens of a row.
            shares_prompts: whether what both documents of a pair begin with is written once (`shared_sizes`).

        Raises:
            DataError: a unit is longer than a row.
        """
        both = source.documents.lengths().reshape(-1, 2)[units]
        sizes = both.sum(axis=1) if source.kind == "pairs" else both.max(axis=1)
        shared = shared_sizes(source.documents, units) if shares_prompts else None
        if shared is not None:
            sizes = sizes - shared
        if sizes.max(initial=0) > length:
            raise DataError(
                "a row is too short for a unit of the preferences",
                got=f"{int(sizes.max())} tokens",
                expected=f"at most {length}",
                fix="use the data.sequence_length that the preferences were prepared with",
            )
        order, rows_at = best_fit(sizes, length)
        return cls(source, length, units[order], rows_at, shared=None if shared is None else shared[order])

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
        """The most documents that a row has, what fills it among them, D: 2 U + 1 of pairs, U + 1 of judged answers.

        Of pairs that share their beginnings it is 3 U + 1.
        """
        of_unit = 1 if not self.is_paired else 2 if self.shared is None else 3
        return of_unit * self.units + 1

    @property
    def filled(self) -> float:
        """The part of all rows that documents take; of judged answers, those with the records."""
        lengths = self.source.documents.lengths().reshape(-1, 2)[self.order]
        tokens = lengths.sum() if self.is_paired else lengths[:, 0].sum()
        if self.shared is not None:
            tokens = tokens - self.shared.sum()
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

        Where pairs share their beginnings, D is 3 U + 1: documents 3u to 3u + 2 are what both begin with, the rest of
        the chosen and the rest of the rejected one, whose positions go on from it, and "prefixes", int32 [n, D], has 3u
        for all three, and its own number for what fills a row.

        Where `reference` is set, "reference", float64 [n, 2 U] or [n, U], has its values for the answers, 0 where a
        row has none, and "kl_reference", float64 [n, U], those of the others. Nothing is random, `positions` not used.
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
            if self.shared is None:
                batch |= self._written(documents.reshape(len(indices), -1), "")
            else:
                batch |= self._shared(indices, documents)
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

    def _shared(self, indices: np.ndarray, documents: np.ndarray) -> dict[str, np.ndarray]:
        """Return rows of pairs that share their beginnings, by number; `documents`: int64 [n, U, 2], -1 for none."""
        assert self.shared is not None
        batch = empty_rows(len(indices), self.length, self.documents, self.source.documents.end_of_text)
        for row, index in enumerate(indices.tolist()):
            sizes = self.shared[self.rows_at[index] : self.rows_at[index + 1]]
            pairs = [tuple(self._pieces(pair)) for pair in documents[row, : len(sizes)]]
            write_shared(batch, row, pairs, sizes)
        batch["prefixes"] = np.broadcast_to(prefixes_of(self.units), (len(indices), self.documents)).copy()
        batch["scored"] = places_of(batch["labels"])
        if self.reference is not None:
            flat = documents.reshape(len(indices), -1)
            batch["reference"] = np.where(flat == NOBODY, 0.0, self.reference[flat])
        return batch

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
    preferences: Preferences, length: int, validation_fraction: float, *, shares_prompts: bool = False
) -> tuple[PreferenceRows, PreferenceRows | None]:
    """Return the rows of units that are trained on, and of those kept for validation: one at least, None for none.

    The units that are kept are spread over the source, and the same for every run on it.

    Args:
        preferences: the units.
        length: tokens of a row.
        validation_fraction: the part of the units that is kept.
        shares_prompts: as `PreferenceRows.of` has it.

    Raises:
        DataError: nothing is left to train on, or a unit is longer than a row.
    """
    noun = "pairs" if preferences.kind == "pairs" else "judged answers"
    training, validation = divide(preferences.units, validation_fraction, noun)
    pack = partial(PreferenceRows.of, preferences, length=length, shares_prompts=shares_prompts)
    return pack(training), None if validation is None else pack(validation)


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
