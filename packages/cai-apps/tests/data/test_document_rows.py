"""Documents in rows: nothing is lost or seen twice; boundaries, positions and labels are those of the documents."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from cai_apps.data.document_rows import DocumentRows, split_documents
from cai_apps.data.packed import IGNORED
from cai_apps.data.packing import best_fit, cut
from cai_mesh.errors import DataError


@dataclass(frozen=True)
class Source:
    sizes: tuple[int, ...]
    learned: tuple[bool, ...] | None = None
    end_of_text: int = 0

    def stream(self):
        return np.arange(1, sum(self.sizes) + 1, dtype=np.uint16)

    def starts(self):
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def marks(self):
        return None if self.learned is None else np.array(self.learned)


def test_pieces_of_long_documents():
    first, sizes = cut(np.array([0, 3, 13, 14]), 4)
    assert first.tolist() == [0, 3, 7, 11, 13]
    assert sizes.tolist() == [3, 4, 4, 2, 1]


@pytest.mark.parametrize("count", [1, 7, 500])
def test_best_fit_puts_every_piece_into_one_row(count):
    random = np.random.default_rng(count)
    sizes = random.integers(1, 33, count)
    order, rows_at = best_fit(sizes, 32)
    assert sorted(order.tolist()) == list(range(count))
    used = np.add.reduceat(sizes[order], rows_at[:-1])
    assert used.max() <= 32 and (np.diff(rows_at) > 0).all()
    # no better than the best, and no worse than first fit's bound of 11/9 of it (Johnson, 1973)
    assert len(used) <= -(-int(sizes.sum()) // 32) * 11 / 9 + 1


def test_best_fit_is_that_of_a_loop_over_rows():
    sizes = np.random.default_rng(3).integers(1, 20, 200)
    rooms: list[int] = []
    for size in sorted(sizes.tolist(), reverse=True):
        fitting = [(room, row) for row, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting)[1]] -= size
        else:
            rooms.append(20 - size)
    assert len(best_fit(sizes, 20)[1]) - 1 == len(rooms)


def test_a_row_says_where_its_documents_are():
    rows = DocumentRows.of(Source((3, 5, 2)), np.arange(3), 8)
    assert (rows.size, rows.documents) == (2, 2)
    batch = rows.rows(np.arange(2), np.arange(2))
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 0, 0, 0, 0, 0, 0]]
    assert batch["cu_seqlens"].tolist() == [[0, 3, 8], [0, 2, 8]]
    assert batch["cu_seqlens"].dtype == torch.int32
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5]]
    assert batch["labels"].tolist() == [
        [2, 3, IGNORED, 5, 6, 7, 8, IGNORED],
        [10, *[IGNORED] * 7],
    ]


def test_a_piece_of_a_long_document_predicts_the_next_one_s_first_token():
    rows = DocumentRows.of(Source((6,)), np.arange(1), 4)
    batch = rows.rows(np.arange(2), np.arange(2))
    assert batch["labels"].tolist() == [[2, 3, 4, 5], [6, IGNORED, IGNORED, IGNORED]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3], [0, 1, 0, 1]]


def test_only_tokens_that_are_trained_are_targets():
    rows = DocumentRows.of(Source((4,), (False, False, True, False)), np.arange(1), 4)
    assert rows.rows(np.arange(1), np.arange(1))["labels"].tolist() == [[IGNORED, 3, IGNORED, IGNORED]]


@pytest.mark.parametrize("length", [5, 16, 100])
def test_every_token_is_in_one_row_and_a_target_once(length):
    sizes = tuple(np.random.default_rng(1).integers(1, 40, 60).tolist())
    source = Source(sizes)
    rows = DocumentRows.of(source, np.arange(60), length)
    batch = rows.rows(np.arange(rows.size), np.arange(rows.size))
    ids = batch["input_ids"][batch["input_ids"] > 0].tolist()
    assert sorted(ids) == source.stream().tolist()
    targets = batch["labels"][batch["labels"] >= 0].tolist()
    firsts = set((source.starts()[:-1] + 1).tolist())
    assert sorted(targets) == [token for token in source.stream().tolist() if token not in firsts]
    assert (batch["cu_seqlens"][:, -1] == length).all() and (batch["cu_seqlens"].diff() >= 0).all()


def test_documents_that_are_held_out_are_never_trained_on():
    source = Source((5,) * 40)
    training, validation = split_documents(source, 16, 0.1)
    seen = [
        set(rows.rows(np.arange(rows.size), np.arange(rows.size))["input_ids"].unique().tolist()) - {0}
        for rows in (training, validation)
    ]
    assert not seen[0] & seen[1] and len(seen[1]) == 4 * 5
    assert split_documents(source, 16, 0.0)[1] is None
    with pytest.raises(DataError, match="too small to train on"):
        split_documents(Source((5,)), 16, 0.5)
