from __future__ import annotations

import json
import os
import sys
from types import SimpleNamespace

import pytest

from cai_apps.data import content, sources
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


def test_content_follows_the_bytes_and_not_the_place(tmp_path):
    first, second, cache = tmp_path / "a.txt", tmp_path / "b.txt", str(tmp_path / "cache")
    first.write_text("one")
    second.write_text("one")
    digest = sources.content(str(first), cache=cache)
    assert digest == sources.content(str(first), cache=cache) == sources.content(str(second), cache=cache)
    status = first.stat()
    first.write_text("two")
    os.utime(first, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert digest != sources.content(str(first), cache=cache)


def test_a_file_that_is_settled_is_not_read_again(tmp_path, monkeypatch):
    file, cache = tmp_path / "a.txt", str(tmp_path / "cache")
    file.write_text("one")
    monkeypatch.setattr(content, "SETTLING", -1)
    digest = sources.content(str(file), cache=cache)
    with monkeypatch.context() as unreadable:
        unreadable.setattr(content, "PART", "no file is read")
        assert sources.content(str(file), cache=cache) == digest
    file.write_text("two")
    assert sources.content(str(file), cache=cache) != digest


@pytest.mark.parametrize("damage", ["", "[1]", '{"a": 3}', "{"])
def test_a_damaged_record_of_digests_is_made_anew(tmp_path, monkeypatch, damage):
    file, cache = tmp_path / "a.txt", tmp_path / "cache"
    file.write_text("one")
    monkeypatch.setattr(content, "SETTLING", -1)
    digest = sources.content(str(file), cache=str(cache))
    (record,) = (cache / content.DIGESTS).glob("*.json")
    record.write_text(damage)
    assert sources.content(str(file), cache=str(cache)) == digest
    assert json.loads(record.read_text())


@pytest.mark.parametrize("name", ["a.JSONL", "a.ndjson", "a.Jsonl"])
def test_lines_of_objects_by_other_names(tmp_path, name):
    (tmp_path / name).write_text('{"text": "one"}\n')
    assert list(sources.documents(str(tmp_path / name))) == ["one"]


@pytest.mark.parametrize(
    "ending", [".gz", ".zst", ".pdf", ".PDF.gz", ".ipynb", ".arrow", ".xlsx", ".tar.gz", ".parquet.gz"]
)
def test_other_formats_are_not_trained_on_as_text(tmp_path, ending):
    file = tmp_path / f"a{ending}"
    file.write_text('[{"text": "one"}]')
    with pytest.raises(DataError, match=r"is not plain text|packed table") as caught:
        list(sources.documents(str(file)))
    assert str(file) in str(caught.value)
    with pytest.raises(DataError):
        sources.content(str(file), cache=str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["a", "a.md", "a.py", "a.rst", "a.text", "README"])
def test_text_by_any_other_name(tmp_path, name):
    (tmp_path / name).write_text("one", encoding="utf-8-sig")  # as Windows writes it
    assert list(sources.documents(str(tmp_path / name))) == ["one"]
