"""Streams of text: the rows of every document once, on any number of ranks, and again from any position."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from chat_templates import CHATML
from chat_tokenizers import setting

from cai_apps.applications.language.config import Config
from cai_apps.applications.language.rules import check_texts
from cai_apps.applications.language.texts import prepared_texts
from cai_apps.data.batches import Batches
from cai_apps.data.section import Data
from cai_apps.data.streams import StreamRows, mixed, prepare_stream
from cai_apps.data.tokenizer import load_tokenizer
from cai_mesh.errors import ConfigError, DataError

LENGTH, SHARDS, DOCUMENTS = 16, 3, 40


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """Three shards of parquet, as a copy of a data set has them, and a tokenizer."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    home = tmp_path_factory.mktemp("stream")
    setting(CHATML).tokenizer.save_pretrained(home / "tokenizer")
    (home / "set").mkdir()
    for shard in range(SHARDS):
        texts = [f"document {shard} {number} " * (1 + number % 7) for number in range(DOCUMENTS)]
        table = pyarrow.table({"body": texts, "id": list(range(DOCUMENTS))})
        name = f"train-{shard:05d}-of-{SHARDS:05d}.parquet"
        parquet.write_table(table, home / "set" / name, row_group_size=7)
    return home


def section(home, **options) -> Data:
    values = {"text_column": "body", "sequence_length": LENGTH, "streaming": True, "shuffle_buffer": 1}
    places = {"source": str(home / "set"), "tokenizer": str(home / "tokenizer"), "cache": str(home / "cache")}
    return Data(**{**places, **values, **options})


def stream(home, seed=0, **options) -> StreamRows:
    return StreamRows(prepare_stream(section(home, **options), 4096), LENGTH, seed)


def read(rows: StreamRows, *numbers: int) -> np.ndarray:
    indices = np.array(numbers)
    return rows.rows(indices, indices)["input_ids"].numpy()


def test_an_unmixed_stream_is_what_datasets_streams(home):
    """Texts and their order are those of `datasets` in its streaming mode; rows are their ids, cut."""
    datasets = pytest.importorskip("datasets")
    published = datasets.load_dataset(
        str(home / "set"), split="train", streaming=True, cache_dir=str(home / "hf")
    )
    tokenizer = load_tokenizer(home / "tokenizer")
    ids = [
        token for row in published for token in [*tokenizer(row["body"])["input_ids"], tokenizer.eos_token_id]
    ]
    assert len(ids) > 10 * LENGTH
    expected = np.array(ids[: len(ids) // LENGTH * LENGTH]).reshape(-1, LENGTH)
    rows = stream(home).rows(np.arange(len(expected)), np.arange(len(expected)))
    assert np.array_equal(rows["input_ids"].numpy(), expected)
    assert torch.equal(rows["labels"][:, :-1], rows["input_ids"][:, 1:])
    assert (rows["labels"][:, -1] == -100).all()
    after = read(stream(home), len(expected))[0]  # the first document follows the last
    rest = len(ids) - expected.size
    assert after[rest:].tolist() == ids[: LENGTH - rest]


@pytest.mark.parametrize("buffer", [1, 8, 1000])
def test_a_run_that_goes_on_sees_what_a_run_in_one_piece_sees(home, buffer):
    """From any position, on another number of data ranks, the global batches are the same rows in the same order."""

    def batches(first, count, ranks):
        per_rank = []
        for rank in range(ranks):
            samples = stream(home, seed=3, shuffle_buffer=buffer)
            reader = Batches(samples, 4, 1, rank, ranks, seed=None)
            per_rank.append([reader.at(first + 4 * number) for number in range(count)])
        return [
            torch.cat([batch["input_ids"] for parts in per_rank for batch in parts[number]])
            for number in range(count)
        ]

    whole = batches(0, 40, 1)  # more than an epoch
    for first, ranks in ((0, 2), (12, 1), (12, 4), (24, 2)):
        again = batches(4 * first, 4, ranks)
        assert all(
            torch.equal(one, other) for one, other in zip(again, whole[first : first + 4], strict=True)
        )


def test_a_row_behind_begins_anew(home):
    rows = stream(home, shuffle_buffer=5)
    first = read(rows, 3, 4, 9)
    assert np.array_equal(read(rows, 4), first[1:2])
    assert np.array_equal(read(rows, 3, 4, 9), first)


def test_a_buffer_mixes_every_text_once_by_the_seed():
    texts = [str(number) for number in range(200)]
    orders = {seed: list(mixed(texts, 16, seed)) for seed in ("0 0", "0 1", "1 0")}
    assert all(Counter(order) == Counter(texts) and order != texts for order in orders.values())
    assert len({tuple(order) for order in orders.values()}) == 3
    assert orders["0 0"] == list(mixed(iter(texts), 16, "0 0"))
    assert all(
        int(text) <= place + 16 for place, text in enumerate(orders["0 0"])
    )  # no text comes before it is read
    assert list(mixed(texts, 1, "0")) == texts


def test_a_stream_is_known_by_content(home, tmp_path):
    digests = {prepare_stream(section(home, **options), 4096).text for options in (
        {}, {"shuffle_buffer": 2}, {"limit_bytes": 99}, {"text_column": "id"})}  # fmt: skip
    assert len(digests) == 4
    copy = tmp_path / "moved"
    copy.mkdir()
    for path in (home / "set").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    assert prepare_stream(section(home, source=str(copy)), 4096).text in digests
    (copy / "train-00002-of-00003.parquet").unlink()
    assert prepare_stream(section(home, source=str(copy)), 4096).text not in digests


def test_what_cannot_be_streamed(home, tmp_path):
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(DataError, match="is empty"):
        read(stream(home, source=str(tmp_path / "empty.txt")), 0)
    with pytest.raises(DataError, match="no text in the column"):
        read(stream(home, text_column="id"), 0)
    with pytest.raises(DataError, match="beyond the model's vocabulary"):
        read(StreamRows(prepare_stream(section(home), 10), LENGTH, 0), 0)
    config = Config()
    for options in (
        {"format": "chat"},
        {"boundaries": "keep"},
        {"tokenizer": "train"},
        {"tokenizer": "auto"},
    ):
        with pytest.raises(ConfigError, match="tokenized as it is read"):
            check_texts(
                replace(
                    config,
                    data=section(
                        home, **options, **({} if "format" not in options else {"text_column": "text"})
                    ),
                )
            )
    validated = replace(config.train, validate_every=2)
    with pytest.raises(ConfigError, match=r"without data\.validation_source"):
        check_texts(replace(config, data=section(home), train=validated))
    check_texts(replace(config, data=section(home, validation_source="held.txt"), train=validated))
    with pytest.raises(ConfigError, match="mixes a stream"):
        check_texts(replace(config, data=replace(config.data, shuffle_buffer=5)))


@pytest.mark.parametrize("streaming", [True, False])
def test_a_source_of_its_own_is_validated_on(home, streaming, tmp_path):
    (tmp_path / "held.jsonl").write_text("".join(json.dumps({"body": f"held {n}"}) + "\n" for n in range(9)))
    options = {
        "streaming": streaming,
        "validation_source": str(tmp_path / "held.jsonl"),
        "shuffle_buffer": 1000,
    }
    prepared = prepared_texts(section(home, **options), 4096)
    assert prepared.held_out is not None
    assert prepared.held_out.count == 9 and prepared.held_out.vocabulary == prepared.vocabulary
