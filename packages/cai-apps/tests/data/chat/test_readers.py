"""Files to records, with their lines and rows."""

from __future__ import annotations

import json
import sys

import pytest

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.readers import content, read_records
from cai_mesh.errors import DataError

ROWS = [{"prompt": "q", "completion": "a"}, {"prompt": "é", "completion": "b"}]
TEXTS = {
    "a.jsonl": "\ufeff" + json.dumps(ROWS[0]) + "\n\n" + json.dumps(ROWS[1], ensure_ascii=False) + "\n",
    "a.ndjson": json.dumps(ROWS[0]) + "\r\n\r\n" + json.dumps(ROWS[1]),
    "b.json": "\n\n" + json.dumps(ROWS[0]) + "\n" + json.dumps(ROWS[1]),
    "c.json": json.dumps(ROWS),
    "d.json": json.dumps(ROWS, indent=1),
    "e.json": "\ufeff  [ ]",
}
PLACES = {
    "a.jsonl": [1, 3],
    "a.ndjson": [1, 3],
    "b.json": [3, 4],
    "c.json": [1, 1],
    "d.json": [2, 6],
    "e.json": [],
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_file_of_text_is_read_with_the_numbers_of_its_lines(name, tmp_path):
    path = tmp_path / name
    path.write_text(TEXTS[name], encoding="utf-8")
    records = list(read_records(str(path)))
    assert [record.value for record in records] == ROWS[: len(PLACES[name])]
    assert [record.place for record in records] == [f"{path}:{line}" for line in PLACES[name]]


def test_a_broken_line_is_an_error_between_the_others(tmp_path):
    path = tmp_path / "a.jsonl"
    lines = [
        b'{"prompt": ',
        b"[1]",
        b'{"prompt": "\xff"}',
        b'{"prompt": "\\ud800"}',
        json.dumps(ROWS[0]).encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    *broken, last = read_records(str(path))
    assert last.value == ROWS[0]
    for number, record in enumerate(broken, start=1):
        assert isinstance(record.value, DataError)
        assert f"{path}:{number}" in str(record.value)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('[\n{"a": 1},\n{"b": }\n]', 3),
        ('[\n{"a": 1}\n{"b": 2}\n]', 3),
        ('[{"a": 1},', 1),
        ("[\n", 2),
        ('[{"a": 1},]', 1),
    ],
)
def test_a_broken_list_names_the_line(text, line, tmp_path):
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(DataError) as caught:
        list(read_records(str(path)))
    assert f"{path}:{line}\n" in str(caught.value)


def test_an_element_that_is_no_object(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[{"a": 1},\n3]')
    _, second = read_records(str(path))
    assert f"{path}:2 is no object" in str(second.value)


def test_records_are_read_one_by_one(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n" * 3 + "{")
    assert next(read_records(str(path))).value == ROWS[0]


def test_a_glob_and_what_is_not_there(tmp_path):
    for name in ("b.jsonl", "a.jsonl"):
        (tmp_path / name).write_text(json.dumps({"prompt": name, "completion": "a"}))
    assert [record.value["prompt"] for record in read_records(f"{tmp_path}/*.jsonl")] == [
        "a.jsonl",
        "b.jsonl",
    ]
    with pytest.raises(DataError, match="matches no file"):
        next(read_records(f"{tmp_path}/c*"))
    assert len(list(read_records(str(tmp_path)))) == 2


@pytest.mark.parametrize("name", ["a.txt", "a", "a.gz", "a.parquet.gz", "a.txt.gz"])
def test_a_file_of_another_kind(name, tmp_path):
    (tmp_path / name).write_text("{}")
    with pytest.raises(DataError, match="no file of conversations"):
        next(read_records(str(tmp_path / name)))


CALLS = [
    {"prompt": "q", "completion": [{"role": "assistant", "content": None, "tool_calls": [
        {"function": {"name": name, "arguments": arguments}}]}]}
    for name, arguments in (("add", {"a": 1}), ("say", {"word": "b"}))
]  # fmt: skip


def test_parquet_brings_no_keys_that_an_object_does_not_have(tmp_path):
    """A column is of one type: where the arguments of calls differ, it has all of them, and nulls (ms-swift 6467)."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.Table.from_pylist(CALLS), path)
    records = list(read_records(str(path)))
    assert [record.place for record in records] == [f"{path}, row 0", f"{path}, row 1"]
    calls = [read_conversation(record.value).messages[1].tool_calls[0]["function"] for record in records]
    assert calls == [{"name": "add", "arguments": {"a": 1}}, {"name": "say", "arguments": {"word": "b"}}]


def test_a_directory_of_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list(ROWS).save_to_disk(str(tmp_path / "set"))
    assert [record.value for record in read_records(str(tmp_path / "set"))] == ROWS


@pytest.mark.parametrize(("package", "name"), [("pyarrow", "a.parquet"), ("datasets", "dataset_info.json")])
def test_a_package_that_is_not_installed_is_named(package, name, tmp_path, monkeypatch):
    (tmp_path / name).write_text("{}")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(DataError, match=r"pip install 'cai-apps\[data\]'"):
        next(read_records(str(tmp_path / name if package == "pyarrow" else tmp_path)))


def test_damaged_parquet(tmp_path):
    pytest.importorskip("pyarrow")
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 9)
    with pytest.raises(DataError, match="is damaged"):
        list(read_records(str(tmp_path / "a.parquet")))


def test_content_follows_the_bytes(tmp_path):
    path, cache = tmp_path / "a.jsonl", str(tmp_path / "cache")
    path.write_text("{}")
    digest = content(str(path), cache=cache)
    (tmp_path / "b.jsonl").write_text("{}")
    assert content(str(tmp_path / "b.jsonl"), cache=cache) == digest
    path.write_text("{ }")
    assert content(str(path), cache=cache) != digest
