"""`cai data stats`: numbers that can be counted by hand, pandas and the tokenizer beside."""

from __future__ import annotations

import json

import numpy as np
import pytest
from chat_templates import CHATML
from chat_tokenizers import setting

from cai_apps.cli import main
from cai_apps.run.exit_codes import USER_ERROR

TEXTS = ["one two three", "", "é" * 40, "one two three", None, "x " * 300]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    tokenizer = setting(CHATML).tokenizer
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"body": text}) + "\n" for text in TEXTS))
    (tmp_path / "b.txt").write_text("one two three")
    monkeypatch.chdir(tmp_path)
    return tokenizer


def stats(capsys, *arguments):
    code = main(["data", "stats", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_numbers_are_those_of_the_texts(folder, capsys):
    flags = ("--data.text_column", "body", "--tokenizer", "model", "--data.sequence_length", "64", "--json")
    code, out, _ = stats(capsys, "a.jsonl", *flags)
    numbers, texts = json.loads(out), [text for text in TEXTS if text]
    lengths = [len(folder(text)["input_ids"]) + 1 for text in texts]  # and the end of each
    assert code == 0
    assert (numbers["records"], numbers["documents"]) == (6, 4)
    assert (numbers["empty"], numbers["duplicates"]) == (2, 1)
    assert numbers["bytes"] == sum(len(text.encode()) for text in texts)
    assert numbers["characters"] == sum(map(len, texts))
    assert numbers["tokens"] == sum(lengths)
    assert list(numbers["percentiles"].values()) == [
        int(np.percentile(lengths, share, method="inverted_cdf")) for share in (0, 50, 90, 95, 99, 100)
    ]
    assert numbers["longer"] == sum(length > 64 for length in lengths) > 0
    assert numbers["cut_tokens"] == sum(max(0, length - 64) for length in lengths)
    assert [text for _, text in numbers["first"]] == [text[:300] for text in texts[:3]]
    assert numbers["first"][1][0] == "a.jsonl:3"


def test_several_sources_in_words(folder, capsys):
    code, out, _ = stats(capsys, "b.txt", "--more-sources", "b.txt")
    assert code == 0
    assert "2 documents of 2 records; 0 are empty, 1 (50.0%) have the text of one before them" in out
    assert "26 bytes, 26 characters\n" in out and "--tokenizer MODEL counts tokens" in out
    assert out.startswith("b.txt\none two three\n")


def test_a_column_that_is_not_there(folder, capsys):
    code, _, err = stats(capsys, "a.jsonl")
    assert code == USER_ERROR and "data.text_column" in err and "'body'" in err


@pytest.mark.parametrize("words", [("check", "--text-column", "body"), ("stats", "--trained", "last")])
def test_options_of_the_other_action_are_refused(folder, words, capsys):
    action, *flags = words
    assert main(["data", action, "a.jsonl", *flags]) == USER_ERROR
    assert flags[0] in capsys.readouterr().err


def test_repeated_conversations_are_counted(folder, capsys, tmp_path):
    records = [
        {"prompt": "q", "completion": "a"},
        {"completion": "a", "prompt": "q"},
        {"prompt": "q", "completion": "b"},
    ]
    (tmp_path / "c.jsonl").write_text("\n".join(map(json.dumps, records)))
    assert main(["data", "check", "c.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["duplicates"] == 1
