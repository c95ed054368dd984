from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from cai_apps.data.prepare import check_ids, prepare
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import END_OF_TEXT, load_tokenizer, train_tokenizer
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


def test_a_tokenizer_edited_in_place_makes_another_entry(data, tmp_path):
    """The cache knew a tokenizer by its name: two projects with `data.tokenizer = "tok"` shared one's ids."""
    directory = tmp_path / "tok"
    data = replace(data, tokenizer=str(directory))
    tokens = []
    for rows in (300, 260):
        train_tokenizer(["the cat sat on the mat. "] * 20, rows).save_pretrained(directory)
        tokens.append(prepare(data, 300).tokens)
    assert tokens[0] < tokens[1]
    train_tokenizer(["the cat sat on the mat. "] * 20, 300).save_pretrained(directory)
    assert prepare(data, 300).tokens == tokens[0]


def test_a_text_edited_in_place_makes_another_entry(data, tmp_path):
    """The cache knew a text by its size and time of modification."""
    file = tmp_path / "0.txt"
    before, status = prepare(data, 300), file.stat()
    file.write_text(file.read_text().replace("cat", "dog"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert file.stat().st_size == status.st_size
    after = prepare(data, 300)
    assert "dog" in load_tokenizer(after.tokenizer).decode(after.stream())
    assert before.text != after.text


def test_the_same_text_elsewhere_is_the_same_entry(data, tmp_path):
    copies = tmp_path / "copies"
    copies.mkdir()
    for file in tmp_path.glob("*.txt"):
        (copies / file.name).write_bytes(file.read_bytes())
    assert prepare(data, 300) == prepare(replace(data, source=str(copies / "*.txt")), 300)


def test_special_tokens_are_part_of_the_key(data, tmp_path):
    (tmp_path / "0.txt").write_text(f"{END_OF_TEXT} begins this text. " * 9)
    assert prepare(data, 300).tokens > prepare(replace(data, special_tokens="parse"), 300).tokens


def test_large_vocabulary_uses_32_bits(data):
    assert prepare(data, 70_000).stream().dtype == np.uint32


def test_existing_tokenizer_directory(data):
    trained = prepare(data, 300)
    reused = prepare(replace(data, tokenizer=str(trained.tokenizer)), 400)
    assert reused.vocabulary == trained.vocabulary
    assert (reused.stream() == trained.stream()).all()


def test_token_beyond_the_vocabulary(data):
    trained = prepare(data, 300)
    with pytest.raises(DataError, match="token id beyond the model's vocabulary") as caught:
        prepare(replace(data, tokenizer=str(trained.tokenizer)), 100)
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


def test_nulls_are_no_document_and_said(data, tmp_path, capsys):
    lines = [json.dumps({"text": text}) for text in ("a " * 200, None, "b " * 200, None)]
    (tmp_path / "nulls.jsonl").write_text("\n".join(lines))
    prepared = prepare(replace(data, source=str(tmp_path / "nulls.jsonl")), 300)
    assert prepared.count == 2
    printed = capsys.readouterr().out
    assert (
        "records without a text are passed over: 2, the first is " in printed and "nulls.jsonl:2" in printed
    )
