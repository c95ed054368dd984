from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import pytest

from cai_apps.data import sources
from cai_mesh.errors import DataError


def test_stdlib_is_the_same_every_time_and_holds_code_and_prose():
    texts = list(sources.documents("stdlib", limit_bytes=400_000))
    assert texts == list(sources.documents("stdlib", limit_bytes=400_000))
    assert sum(len(text.encode()) for text in texts) == 400_000
    assert any("import " in text for text in texts)
    from pydoc_data.topics import topics

    assert any(text in topics.values() for text in texts)


def test_glob_reads_files_in_order_of_their_names(tmp_path):
    for name, text in (("b.txt", "two"), ("a.txt", "one"), ("c.md", "no")):
        (tmp_path / name).write_text(text)
    assert list(sources.documents(str(tmp_path / "*.txt"))) == ["one", "two"]


def test_limit_cuts_inside_a_document_at_a_whole_character(tmp_path):
    (tmp_path / "a.txt").write_text("aé" * 10)
    assert list(sources.documents(str(tmp_path / "a.txt"), limit_bytes=5)) == ["aéa"]


def test_jsonl_passes_over_blank_lines(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "one"}\n\n{"text": "two", "id": 3}\n')
    assert list(sources.documents(str(file))) == ["one", "two"]


@pytest.mark.parametrize("line", ['{"text": "cut', '{"body": "x"}', '["text"]', '{"text": 3}', "null"])
def test_broken_jsonl_line_is_named_by_file_and_number(tmp_path, line):
    file = tmp_path / "a.jsonl"
    file.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    with pytest.raises(DataError) as caught:
        list(sources.documents(str(file)))
    assert f"{file}:3" in str(caught.value)
    assert line[:10] in str(caught.value)


def test_jsonl_that_is_not_utf8(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"text": "fine"}\n{"text": "\xff"}\n')
    with pytest.raises(DataError, match=r"a\.jsonl:2"):
        list(sources.documents(str(file)))


def test_text_that_is_not_utf8(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="not UTF-8"):
        list(sources.documents(str(tmp_path / "a.txt")))


def test_nothing_there(tmp_path):
    with pytest.raises(DataError, match="matches no file"):
        list(sources.documents(str(tmp_path / "*.txt")))


def test_plain_directory_shows_the_glob_to_use(tmp_path):
    with pytest.raises(DataError, match=r"\*\*/\*.txt"):
        list(sources.documents(str(tmp_path)))


@pytest.fixture
def dataset_directory(tmp_path):
    (tmp_path / "dataset_info.json").write_text(json.dumps({}))
    return str(tmp_path)


class Table(list):
    def __init__(self, rows):
        super().__init__(rows)
        self.column_names = list(rows[0])


def test_dataset_directory_without_the_package_says_how_to_get_it(dataset_directory, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r"pip install 'cai-apps\[data\]'"):
        list(sources.documents(dataset_directory))


@pytest.mark.parametrize(
    "loaded",
    [
        Table([{"text": "one"}, {"text": "two"}]),
        {"test": None, "train": Table([{"text": "one"}, {"text": "two"}])},
    ],
)
def test_dataset_directory_reads_the_text_column_of_the_training_split(
    dataset_directory, monkeypatch, loaded
):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: loaded))
    assert list(sources.documents(dataset_directory)) == ["one", "two"]


def test_dataset_directory_without_a_text_column(dataset_directory, monkeypatch):
    table = Table([{"body": "one"}])
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_from_disk=lambda path: table))
    with pytest.raises(DataError, match="no column 'text'"):
        list(sources.documents(dataset_directory))


def test_fingerprint_follows_the_files(tmp_path):
    file = tmp_path / "a.txt"
    file.write_text("one")
    before = sources.fingerprint(str(file))
    assert before == sources.fingerprint(str(file))
    file.write_text("three")
    assert before != sources.fingerprint(str(file))
