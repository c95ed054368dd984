"""Conversations in files that ranks map into memory, and what is counted on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from chat_templates import CHATML, GENERATION, T, turns
from chat_tokenizers import setting

from cai_apps.data.chat import prepare
from cai_apps.data.chat.prepare import length_report, prepare_chat
from cai_apps.data.chat.tokenizer import END, TEMPLATE
from cai_apps.data.documents import Documents, write_documents
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer
from cai_mesh.errors import ConfigError, DataError

RECORD, PARTS = CHATML.cases["two turns after a system's"]
ROWS = [RECORD, turns("Hi", "Hello!"), {"prompt": "So long, and be kind", "completion": "It is 5."}]


@pytest.fixture
def data(tmp_path):
    setting(CHATML).tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return Data(
        source=str(tmp_path / "chats.jsonl"), tokenizer=str(tmp_path / "model"), cache=str(tmp_path / "cache")
    )


def test_documents_are_the_conversations_and_their_masks(data):
    documents = prepare_chat(data, 500)
    tokenizer = load_tokenizer(documents.tokenizer)
    assert (documents.count, documents.dtype, documents.end_of_text) == (3, "uint16", tokenizer.eos_token_id)
    assert tokenizer.decode(documents.ids(0)) == "".join(PARTS)
    trained = "".join(part for part in PARTS if isinstance(part, T))
    assert tokenizer.decode(documents.ids(0)[documents.trained(0)]) == trained
    assert tokenizer.decode(documents.ids(2)[documents.trained(2)]) == "It is 5.<|im_end|>"
    lengths = documents.lengths()
    assert lengths.dtype == np.int64 and lengths.tolist() == [
        len(documents.ids(number)) for number in range(3)
    ]
    assert int(lengths.sum()) == documents.tokens
    report = length_report(documents)
    assert (report.count, report.maximum, report.tokens) == (3, lengths.max(), documents.tokens)
    assert report.trained == sum(int(documents.trained(number).sum()) for number in range(3))


def test_second_preparation_reads_the_cache(data, monkeypatch):
    first = prepare_chat(data, 500)
    monkeypatch.setattr(prepare, "_write", None)
    assert prepare_chat(data, 500) == first


@pytest.mark.parametrize(
    "change",
    [
        {"trained": ("last",)},
        {"special_tokens": "parse"},
        {"sequence_length": 20},
        {"limit_bytes": 40},
        "template",
        "text",
        "tokenizer",
    ],
    ids=str,
)
def test_anything_the_files_depend_on_makes_another_entry(change, data, tmp_path):
    first = prepare_chat(data, 500)
    if change == "template":
        (tmp_path / "t.jinja").write_text(GENERATION.template)
        data = replace(data, chat_template=str(tmp_path / "t.jinja"))
    elif change == "text":
        (tmp_path / "chats.jsonl").write_text(json.dumps(ROWS[0]))
    elif change == "tokenizer":
        setting(CHATML, "metaspace").tokenizer.save_pretrained(tmp_path / "model")
    else:
        data = replace(data, **change)
    second = prepare_chat(data, 500)
    assert second.directory != first.directory
    same_identity = change == {"sequence_length": 20}
    assert ((second.text, second.vocabulary) == (first.text, first.vocabulary)) == same_identity


def test_large_vocabulary_uses_32_bits(data):
    assert prepare_chat(data, 70_000).ids(0).dtype == np.uint32


def test_conversations_are_cut_and_dropped(data, tmp_path):
    complete = prepare_chat(data, 500)
    lengths = complete.lengths().tolist()
    first = [int(np.flatnonzero(complete.trained(number))[0]) for number in range(3)]
    length = min(lengths) - 2  # within the end of the shortest
    documents = prepare_chat(replace(data, sequence_length=length), 500)
    dropped = sum(place >= length for place in first)
    report = length_report(documents)
    assert (report.truncated + report.dropped, report.dropped) == (3, dropped)
    assert documents.count == 3 - dropped and set(documents.lengths().tolist()) == {length}
    assert report.count == 3 and report.maximum == max(lengths)
    shown = "\n".join(report.lines())
    assert f"{report.truncated} are cut at {length} tokens" in shown and f"{dropped} are dropped" in shown


def test_nothing_left(data):
    with pytest.raises(DataError) as caught:
        prepare_chat(replace(data, sequence_length=4), 500)
    assert "no conversation to train on" in str(caught.value) and "3 are dropped" in str(caught.value)
    assert not list(Path(data.cache).glob("unfinished-*"))


def test_limit_bytes_ends_with_a_conversation(data):
    assert prepare_chat(replace(data, limit_bytes=40), 500).count == 2


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            '{"messages": [{"role": "usr", "content": "a"}]}',
            ("chats.jsonl:2: message 1 has an unknown role", "'user'"),
        ),
        ('{"messages": ', ("chats.jsonl:2", "Expecting value")),
        (
            '{"messages": [{"role": "user", "content": "a"}]}',
            ("chats.jsonl:2: the conversation has no answer",),
        ),
        ('{"prompt": "a", "completion": ""}', ("chats.jsonl:2: the answer is empty",)),
    ],
)
def test_a_broken_record_is_named_by_its_line(line, words, data, tmp_path):
    (tmp_path / "chats.jsonl").write_text(f"{json.dumps(ROWS[0])}\n{line}\n")
    with pytest.raises(DataError) as caught:
        prepare_chat(data, 500)
    assert all(word in str(caught.value) for word in (*words, "`cai data check`")), str(caught.value)


def test_what_the_model_has_no_row_for(data):
    with pytest.raises(DataError, match="beyond the model's vocabulary"):
        prepare_chat(data, 300)


@pytest.mark.parametrize("name", ["train", "auto"])
def test_a_tokenizer_is_trained_on_what_messages_say(name, data, tmp_path):
    documents = prepare_chat(replace(data, tokenizer=name), 300)
    tokenizer = load_tokenizer(documents.tokenizer)
    assert tokenizer.eos_token == END and tokenizer.chat_template == TEMPLATE
    assert tokenizer.decode(documents.ids(1)[documents.trained(1)]) == f"Hello!{END}"
    assert prepare_chat(replace(data, tokenizer=name), 500, tmp_path / "model") == prepare_chat(data, 500)


def test_a_template_of_a_file_goes_with_the_tokenizer(data, tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    documents = prepare_chat(replace(data, chat_template=str(tmp_path / "template.jinja")), 500)
    assert load_tokenizer(documents.tokenizer).chat_template == TEMPLATE


def test_a_tokenizer_without_an_end(data, tmp_path):
    setting(CHATML, eos=None).tokenizer.save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        prepare_chat(data, 500)


def test_documents_without_marks_are_trained_on_as_a_whole(tmp_path):
    texts = [np.array([1, 2, 3]), np.array([4])]
    count, tokens = write_documents(tmp_path, ((ids, None) for ids in texts), "uint16")
    documents = Documents(tmp_path, count, tokens, "uint16", 0, "", "")
    assert [documents.ids(number).tolist() for number in range(2)] == [[1, 2, 3], [4]]
    assert documents.trained(0).tolist() == [True] * 3 and documents.lengths().tolist() == [3, 1]
