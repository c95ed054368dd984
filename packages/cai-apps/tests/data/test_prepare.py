from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cai_apps.data.prepare import check_ids, prepare
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import END_OF_TEXT, load_tokenizer
from cai_mesh.errors import ConfigError, DataError


@pytest.fixture
def data(tmp_path):
    for index in range(5):
        (tmp_path / f"{index}.txt").write_text(f"the cat number {index} sat on the mat. " * 20)
    return Data(source=str(tmp_path / "*.txt"), cache=str(tmp_path / "cache"), sequence_length=16)


def test_tokens_decode_to_the_documents_joined_by_end_of_text(data, tmp_path):
    prepared = prepare(data, 300)
    tokenizer = load_tokenizer(prepared.tokenizer)
    texts = [file.read_text() for file in sorted(tmp_path.glob("*.txt"))]
    assert tokenizer.decode(prepared.stream()) == "".join(text + END_OF_TEXT for text in texts)
    assert prepared.stream().dtype == np.uint16
    assert prepared.stream().max() < 300


def test_second_preparation_reads_the_cache(data, monkeypatch):
    first = prepare(data, 300)
    monkeypatch.setattr("cai_apps.data.prepare._write", None)
    assert prepare(data, 300) == first


@pytest.mark.parametrize("change", [{"limit_bytes": 100}, {"source": "other"}])
def test_anything_the_tokens_depend_on_makes_another_entry(data, tmp_path, change):
    if "source" in change:
        (tmp_path / "0.txt").write_text("something else entirely, and longer than it was before")
    else:
        data = replace(data, **change)
    prepared = prepare(data, 300)
    assert prepared.directory != prepare(replace(data, limit_bytes=50), 300).directory
    assert prepared.directory != prepare(data, 301).directory


def test_large_vocabulary_uses_32_bits(data):
    assert prepare(data, 70_000).stream().dtype == np.uint32


def test_existing_tokenizer_directory(data):
    trained = prepare(data, 300)
    reused = prepare(replace(data, tokenizer=trained.tokenizer), 400)
    assert reused.tokenizer == trained.tokenizer
    assert (reused.stream() == trained.stream()).all()


def test_token_beyond_the_vocabulary(data):
    trained = prepare(data, 300)
    with pytest.raises(DataError, match="token id beyond the model's vocabulary") as caught:
        prepare(replace(data, tokenizer=trained.tokenizer), 100)
    assert "vocab_size = 100" in str(caught.value)
    assert not list(trained.directory.parent.glob("unfinished-*"))


def test_largest_id_of_the_vocabulary_is_accepted():
    check_ids(np.array([0, 99]), 100)
    with pytest.raises(DataError):
        check_ids(np.array([100]), 100)


@pytest.mark.parametrize("text", ["", None])
def test_empty_dataset(tmp_path, text):
    if text is not None:
        (tmp_path / "a.txt").write_text(text)
    source = str(tmp_path / "a.txt")
    with pytest.raises(DataError, match="empty" if text is not None else "matches no file"):
        prepare(Data(source=source, cache=str(tmp_path / "cache")), 300)


def test_vocabulary_too_small_for_bytes(data):
    with pytest.raises(ConfigError, match="too small for a byte-level tokenizer"):
        prepare(data, 256)


def test_unknown_tokenizer(data, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="no tokenizer 'no/such'"):
        prepare(replace(data, tokenizer="no/such"), 300)
