"""Preferences in rows: each array is that of a plain loop over the units."""

from __future__ import annotations

import pickle
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

import numpy as np
import pytest
import torch

from cai_apps.data.batches import Batches
from cai_apps.data.packed import IGNORED
from cai_apps.data.packing import best_fit
from cai_apps.data.preference.rows import PreferenceRows, blank, split_preferences
from cai_apps.data.preference.shared import shared_sizes
from cai_mesh.errors import DataError

FILL = 7


@dataclass(frozen=True)
class Source:
    """Documents of some sizes, each with a prompt of a third of it."""

    sizes: tuple[int, ...]
    end_of_text: int = FILL

    @property
    def count(self):
        return len(self.sizes)

    def stream(self):
        return np.arange(100, 100 + sum(self.sizes), dtype=np.uint32)

    def starts(self):
        return np.concatenate([[0], np.cumsum(self.sizes)]).astype(np.int64)

    def lengths(self):
        return np.array(self.sizes, dtype=np.int64)

    def marks(self):
        return np.concatenate([np.arange(size) >= max(1, size // 3) for size in self.sizes])


@dataclass(frozen=True)
class Preferences:
    documents: Source
    kind: str

    @property
    def units(self):
        return self.documents.count // 2

    def margins(self):
        return np.linspace(0.5, 2, self.units, dtype=np.float32)

    def desirable(self):
        return np.arange(self.units) % 3 == 0

    @cached_property
    def size_of(self):
        both = [self.documents.sizes[n : n + 2] for n in range(0, self.documents.count, 2)]
        return [sum(sizes) if self.kind == "pairs" else max(sizes) for sizes in both]


def preferences_of(kind, units=23, most=12):
    sizes = np.random.default_rng(units).integers(2, most, 2 * units)
    return Preferences(Source(tuple(sizes.tolist())), kind)


def plain_row(preferences, documents, slots, length):
    """A row of documents one after the other, written token by token."""
    stream, starts, marks = (getattr(preferences.documents, name)() for name in ("stream", "starts", "marks"))
    ids, labels, positions, begins = [], [], [], []
    for number in documents:
        begins.append(len(ids))
        for place in range(starts[number], starts[number + 1]):
            has_next = place + 1 < starts[number + 1] and marks[place + 1]
            ids.append(int(stream[place]))
            labels.append(int(stream[place + 1]) if has_next else IGNORED)
            positions.append(int(place - starts[number]))
    begins += [len(ids)] if len(ids) < length else []
    rest = length - len(ids)
    begins += [length] * (slots + 1 - len(begins))
    return ids + [FILL] * rest, labels + [IGNORED] * rest, positions + list(range(rest)), begins


@pytest.mark.parametrize("kind", ["pairs", "judged"])
@pytest.mark.parametrize("length", [24, 40, 200])
def test_rows_are_those_of_a_plain_loop(kind, length):
    preferences = preferences_of(kind)
    reference = -np.arange(1.0, preferences.documents.count + 1)
    rows = replace(PreferenceRows.of(preferences, np.arange(23), length), reference=reference)
    order, rows_at = best_fit(np.array(preferences.size_of), length)
    units = [order[a:b].tolist() for a, b in pairwise(rows_at)]
    most = max(map(len, units))
    assert (rows.size, rows.units) == (len(units), most)
    batch = rows.rows(np.arange(rows.size), np.arange(rows.size))
    sides = {"": [[2 * u + n for u in row for n in (0, 1)] for row in units]} if kind == "pairs" else {
        "": [[2 * u for u in row] for row in units], "kl_": [[2 * u + 1 for u in row] for row in units]}  # fmt: skip
    slots = rows.documents
    assert slots == (2 * most + 1 if kind == "pairs" else most + 1)
    names = ("input_ids", "labels", "position_ids", "cu_seqlens")
    for beginning, documents in sides.items():
        for row, numbers in enumerate(documents):
            plain = plain_row(preferences, numbers, slots, length)
            for name, values in zip(names, plain, strict=True):
                assert batch[beginning + name][row].tolist() == values, (row, beginning + name)
            padded = [reference[n] for n in numbers] + [0.0] * (slots - 1 - len(numbers))
            assert batch[beginning + "reference"][row].tolist() == padded
    for row, numbers in enumerate(units):
        missing = most - len(numbers)
        assert batch["number"][row].tolist() == numbers + [-1] * missing
        assert batch["present"][row].tolist() == [True] * len(numbers) + [False] * missing
        extra, source = (
            ("margin", preferences.margins()) if kind == "pairs" else ("desirable", preferences.desirable())
        )
        assert batch[extra][row].tolist() == [*source[numbers].tolist(), *[0] * missing]
    dtypes = {name: value.dtype for name, value in batch.items()}
    assert {dtypes[name] for name in ("input_ids", "labels", "position_ids", "number")} == {torch.int64}
    assert (dtypes["cu_seqlens"], dtypes["present"], dtypes["reference"]) == (
        torch.int32,
        torch.bool,
        torch.float64,
    )
    assert (
        dtypes.get("margin", torch.float32) == torch.float32
        and dtypes.get("desirable", torch.bool) == torch.bool
    )
    assert ("kl_input_ids" in batch) == (kind == "judged") == ("desirable" in batch) != ("margin" in batch)


@dataclass(frozen=True)
class Alike(Source):
    """Documents whose ids count from 100, so that both of a pair begin alike."""

    def stream(self):
        return np.concatenate([np.arange(100, 100 + size) for size in self.sizes]).astype(np.uint32)


@pytest.mark.parametrize("length", [24, 200])
def test_pairs_that_share_their_beginnings_are_written_from_it(length):
    """Whole documents come together again of a beginning and a rest, with the positions and labels that they had."""
    preferences = preferences_of("pairs")
    preferences = replace(preferences, documents=Alike((*preferences.documents.sizes, 2, 2)))
    units, numbers = preferences.units, np.arange(preferences.units)
    reference = -np.arange(1.0, 2 * units + 1)
    rows = replace(PreferenceRows.of(preferences, numbers, length, shares_prompts=True), reference=reference)
    documents, marks = preferences.documents, preferences.documents.marks()
    starts, stream = documents.starts(), documents.stream()
    batch = rows.rows(np.arange(rows.size), np.arange(rows.size))
    assert batch["prefixes"].dtype == torch.int32 and batch["prefixes"].shape[1] == 3 * rows.units + 1
    once = 0
    for row in range(rows.size):
        bounds, prefixes = batch["cu_seqlens"][row].tolist(), batch["prefixes"][row].tolist()
        present = [number for number in batch["number"][row].tolist() if number >= 0]
        for place, unit in enumerate(present):
            prompts = [max(1, documents.sizes[n] // 3) for n in (2 * unit, 2 * unit + 1)]
            shared = bounds[3 * place + 1] - bounds[3 * place]
            assert shared == min(prompts) - 1
            once += shared
            for side in (0, 1):
                document = 3 * place + 1 + side
                assert prefixes[document] == prefixes[3 * place] == 3 * place
                own = range(bounds[document], bounds[document + 1])
                places = [*range(bounds[3 * place], bounds[3 * place + 1]), *own]
                first, end = starts[2 * unit + side : 2 * unit + side + 2]
                assert batch["input_ids"][row, places].tolist() == stream[first:end].tolist()
                assert batch["position_ids"][row, places].tolist() == list(range(end - first))
                labels = np.append(
                    np.where(marks[first + 1 : end], stream[first + 1 : end].astype(int), IGNORED), IGNORED
                )
                assert batch["labels"][row, places].tolist() == labels.tolist()
                assert batch["reference"][row, 2 * place + side] == reference[2 * unit + side]
        assert prefixes[-1] == 3 * rows.units
    sizes = sum(documents.sizes) - once
    assert rows.filled == pytest.approx(sizes / (rows.size * length)) and once == rows.shared.sum() > 0


def test_documents_of_which_all_is_scored_share_nothing():
    source = Alike((5, 5))
    assert shared_sizes(source, np.array([0])).tolist() == [0]
    object.__setattr__(source, "marks", lambda: None)
    assert shared_sizes(source, np.array([0])).tolist() == [0]


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_a_row_read_alone_is_the_same_but_for_the_width_of_its_scored_places(kind):
    rows = PreferenceRows.of(preferences_of(kind), np.arange(23), 40)
    together = rows.rows(np.arange(rows.size), np.arange(rows.size))
    assert "reference" not in together and "kl_reference" not in together
    for number in range(rows.size):
        alone = rows.rows(np.array([number]), np.array([0]))
        of_all = {name: value[number : number + 1] for name, value in together.items()}
        for name in [name for name in alone if name.endswith("scored")]:
            labels = alone[name.replace("scored", "labels")][0]
            assert alone.pop(name)[0].tolist() == (labels != -100).nonzero()[:, 0].tolist()
            places = of_all.pop(name)[0]
            assert places[labels[places] != -100].tolist() == (labels != -100).nonzero()[:, 0].tolist()
        assert {name: value.tolist() for name, value in alone.items()} == {
            name: value.tolist() for name, value in of_all.items()
        }


def test_rows_travel_to_other_processes_without_their_documents():
    rows = PreferenceRows.of(preferences_of("pairs"), np.arange(23), 40)
    before = rows.rows(np.arange(2), np.arange(2))
    text = pickle.dumps(rows)
    assert len(text) < len(pickle.dumps(rows.source)) + 2000
    after = pickle.loads(text).rows(np.arange(2), np.arange(2))
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_units_that_are_held_out_are_spread_and_never_trained_on(kind):
    preferences = preferences_of(kind, units=200)
    training, validation = split_preferences(preferences, 40, 0.1)
    assert len(validation.order) == 20
    assert sorted([*training.order.tolist(), *validation.order.tolist()]) == list(range(200))
    assert validation.order.min() < 60 and validation.order.max() > 140
    again = split_preferences(preferences, 40, 0.1)[1]
    assert again.order.tolist() == validation.order.tolist()
    assert split_preferences(preferences, 40, 0.0)[1] is None
    with pytest.raises(DataError, match="too small to train on"):
        split_preferences(preferences_of(kind, units=1), 40, 0.5)


def test_a_unit_is_never_cut():
    preferences = preferences_of("pairs")
    with pytest.raises(DataError, match="too short for a unit"):
        split_preferences(preferences, max(preferences.size_of) - 1, 0.0)


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_what_fills_the_last_batch_has_no_unit(kind):
    rows = PreferenceRows.of(preferences_of(kind), np.arange(23), 40)
    size = rows.size
    (batch,) = Batches(rows, size + 2, size + 2, 0, 1, None, blank).at(0)
    assert not batch["present"][size:].any() and (batch["number"][size:] == -1).all()
    for name in ("labels", "kl_labels"):
        assert name not in batch or (batch[name][size:] == IGNORED).all()
    whole = rows.rows(np.arange(size), np.arange(size))
    assert all(torch.equal(batch[name][:size], value) for name, value in whole.items())


@pytest.mark.parametrize("kind", ["pairs", "judged"])
def test_a_hundred_thousand_units_are_packed_in_seconds(kind):
    preferences = preferences_of(kind, units=100_000, most=300)
    start = time.process_time()
    rows, _ = split_preferences(preferences, 2048, 0.01)
    assert time.process_time() - start < 10
    assert rows.filled > (0.95 if kind == "pairs" else 0.6)
