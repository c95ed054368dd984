"""Conversations and preferences in tables, as they are published: lists in parquet, JSON or plain columns in csv."""

from __future__ import annotations

import csv
import json

import pytest

from cai_apps.data.chat.messages import read_conversation
from cai_apps.data.chat.readers import read_records
from cai_apps.data.preference.records import read_preference
from cai_mesh.errors import DataError

TURNS = [{"role": "user", "content": 'say "hi",\nplease'}, {"role": "assistant", "content": "hi"}]
OTHER = [TURNS[0], {"role": "assistant", "content": "no"}]
CHATS = {
    "messages": {"messages": TURNS},
    "conversations": {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
    "prompt": {"prompt": "q", "completion": "a"},
    "prompt of messages": {"prompt": TURNS[:1], "completion": TURNS[1:]},
    "alpaca": {"instruction": "q", "input": "", "output": "a"},
    "history": {"instruction": "q", "input": "i", "output": "a", "history": [["q0", "a0"]]},
    "JSON answer": {"prompt": "q", "completion": '[{"name": "x"}]'},
}
PREFERENCES = {
    "pair": {"chosen": TURNS, "rejected": OTHER},
    "explicit": {"prompt": "q", "chosen": "a", "rejected": "b", "margin": 0.5},
    "judged": {"prompt": "q", "completion": "a", "label": True},
}


def write(path, records):
    """Write records as a person would: pandas or csv for text, JSON where a value is a list."""
    if path.suffix == ".parquet":
        pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(pyarrow.Table.from_pylist(records), path, compression="zstd")
        return path
    with path.open("w", newline="", encoding="utf-8-sig") as file:
        writer = csv.DictWriter(file, [*records[0]])
        writer.writeheader()
        for record in records:
            texts = {
                key: json.dumps(value) if isinstance(value, list) else value for key, value in record.items()
            }
            writer.writerow(texts)
    return path


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize("form", CHATS)
def test_conversations_are_what_their_objects_are(form, ending, tmp_path):
    path = write(tmp_path / f"a{ending}", [CHATS[form]] * 2)
    records = [record.value for record in read_records(str(path))]
    assert [read_conversation(record) for record in records] == [read_conversation(CHATS[form])] * 2


@pytest.mark.parametrize("ending", [".csv", ".parquet"])
@pytest.mark.parametrize("form", PREFERENCES)
def test_preferences_are_what_their_objects_are(form, ending, tmp_path):
    path = write(tmp_path / f"a{ending}", [PREFERENCES[form]] * 2)
    records = [record.value for record in read_records(str(path))]
    assert [read_preference(record) for record in records] == [read_preference(PREFERENCES[form])] * 2


def test_a_label_that_judges_nothing_stays_text(tmp_path):
    path = write(tmp_path / "a.csv", [{"prompt": "q", "completion": "a", "label": "sports"}])
    (record,) = read_records(str(path))
    assert record.value["label"] == "sports"


def test_lists_as_python_prints_them_are_refused_with_their_row(tmp_path):
    pandas = pytest.importorskip("pandas")
    pandas.DataFrame({"messages": [TURNS, TURNS]}).to_csv(tmp_path / "a.csv", index=False)
    first, second = read_records(str(tmp_path / "a.csv"))
    assert isinstance(first.value, DataError) and isinstance(second.value, DataError)
    assert "a.csv:2" in str(first.value) and "as Python prints it" in str(first.value)


def test_several_files_in_a_folder(tmp_path):
    (tmp_path / "set").mkdir()
    write(tmp_path / "set" / "train-0.parquet", [CHATS["messages"]])
    write(tmp_path / "set" / "test-0.parquet", [CHATS["messages"]] * 5)
    other = write(tmp_path / "b.csv", [CHATS["alpaca"]])
    assert len(list(read_records(str(tmp_path / "set"), str(other)))) == 2
