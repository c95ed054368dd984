from __future__ import annotations

import numpy as np
import pytest
import torch

from cai_apps.data.batches import Batches
from cai_apps.data.documents import Documents
from cai_apps.data.packed import IGNORED, blank, count_targets, split
from cai_mesh.errors import DataError

END = 7


@pytest.fixture
def prepared(tmp_path):
    tokens = np.arange(10, 10 + 103, dtype=np.uint16)
    tokens.tofile(tmp_path / "tokens.bin")
    return Documents(tmp_path, 1, len(tokens), "uint16", END, "text", "vocabulary")


def test_sequences_are_cut_from_the_stream(prepared):
    training, _ = split(prepared, 10, 0.0)
    rows = training.rows(np.array([0, 3]), np.arange(2))
    assert rows["input_ids"].tolist() == [list(range(10, 20)), list(range(40, 50))]
    assert rows["labels"].tolist() == [[*range(11, 20), IGNORED], [*range(41, 50), IGNORED]]


def test_short_last_sequence_is_filled_and_not_a_target(prepared):
    training, _ = split(prepared, 10, 0.0)
    rows = training.rows(np.array([10]), np.arange(1))
    assert rows["input_ids"].tolist() == [[110, 111, 112, *[END] * 7]]
    assert rows["labels"].tolist() == [[111, 112, *[IGNORED] * 8]]
    assert count_targets(rows) == 2


def test_validation_is_the_end_and_never_trained_on(prepared):
    training, validation = split(prepared, 10, 0.2)
    assert (training.first, training.size, validation.first, validation.size) == (0, 9, 9, 2)
    batches = Batches(training, 4, 2, 0, 1, seed=0)
    seen = {
        int(batch["input_ids"][row, 0])
        for step in range(20)
        for batch in batches.at(step * 4)
        for row in (0, 1)
    }
    assert seen == {10 * (1 + index) for index in range(9)}


def test_too_small(prepared):
    with pytest.raises(DataError, match="too small to train on"):
        split(prepared, 1000, 0.1)


def rows_of(batches, position):
    return torch.cat([batch["input_ids"] for batch in batches.at(position)])


@pytest.mark.parametrize("ranks, microbatch", [(1, 2), (2, 1), (2, 2), (4, 1)])
def test_any_layout_reads_the_same_global_batch(prepared, ranks, microbatch):
    training, _ = split(prepared, 10, 0.0)
    whole = rows_of(Batches(training, 4, 4, 0, 1, seed=5), 8)
    parts = [rows_of(Batches(training, 4, microbatch, rank, ranks, seed=5), 8) for rank in range(ranks)]
    assert torch.equal(torch.cat(parts), whole)


def test_every_epoch_has_every_sequence_once_in_another_order(prepared):
    training, _ = split(prepared, 10, 0.0)
    batches = Batches(training, 11, 11, 0, 1, seed=5)
    first, second = rows_of(batches, 0)[:, 0].tolist(), rows_of(batches, 11)[:, 0].tolist()
    assert sorted(first) == sorted(second) == [10 * (1 + index) for index in range(11)]
    assert first != second


def test_batch_across_the_end_of_an_epoch(prepared):
    training, _ = split(prepared, 10, 0.0)
    batches = Batches(training, 4, 4, 0, 1, seed=5)
    epoch = [rows_of(batches, 4 * step) for step in range(3)]
    whole = Batches(training, 11, 11, 0, 1, seed=5)
    assert torch.equal(torch.cat(epoch), torch.cat([rows_of(whole, 0), rows_of(whole, 11)])[:12])


def test_samples_that_are_read_once_fill_their_last_batch_without_targets(prepared):
    _, validation = split(prepared, 10, 0.25)
    assert validation.size == 3
    batches = [Batches(validation, 4, 2, rank, 2, seed=None, blank=blank) for rank in (0, 1)]
    labels = torch.cat([batch["labels"] for part in batches for batch in part.at(0)])
    assert labels.shape == (4, 10)
    assert torch.equal(labels[:3], validation.rows(np.arange(3), np.arange(3))["labels"])
    assert (labels[3] == IGNORED).all()
