"""Preferences as documents: which tokens are scored, in what order they stand, and what the cache depends on."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from chat_templates import CHATML, GENERATION
from chat_tokenizers import setting

from cai_apps.data.chat.render import Renderer
from cai_apps.data.chat.template import load_template
from cai_apps.data.preference import prepare, questions, sources
from cai_apps.data.preference.lengths import PreferenceReport
from cai_apps.data.preference.prepare import prepare_preferences
from cai_apps.data.preference.records import read_preference
from cai_apps.data.preference.render import render_judged, render_pair
from cai_apps.data.preference.shared import shared_sizes
from cai_apps.data.section import Data
from cai_apps.data.tokenizer import load_tokenizer
from cai_mesh.errors import ConfigError, DataError

ROWS = [
    {"prompt": "Hi", "chosen": "Hello!", "rejected": "So long.", "margin": 0.5},
    {"prompt": "2+2?", "chosen": "It is 4, and kind.", "rejected": "5"},
    {"prompt": "2+2?", "chosen": "4", "rejected": "bye"},
]
LABELS = [
    {"prompt": "Hi", "completion": "Hello!", "label": True},
    {"prompt": "Hi", "completion": "So long.", "label": False},
    {"prompt": "2+2?", "completion": "4", "label": True},
    {"prompt": "2+2?", "completion": "5", "label": False},
]
BEGIN, END = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n", "<|im_end|>\n"


def write(folder, rows):
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.fixture
def data(tmp_path):
    setting(CHATML).tokenizer.save_pretrained(tmp_path / "model")
    write(tmp_path, ROWS)
    return Data(
        source=str(tmp_path / "rows.jsonl"), tokenizer=str(tmp_path / "model"), cache=str(tmp_path / "cache")
    )


def texts(preferences):
    """Prompt and answer of each document, and what of it is scored."""
    tokenizer, documents = load_tokenizer(preferences.tokenizer), preferences.documents
    for number in range(documents.count):
        ids, trained = documents.ids(number), documents.trained(number)
        yield tokenizer.decode(ids), tokenizer.decode(ids[trained])


def expected(prompt, answer):
    return BEGIN.format(prompt) + answer + END, answer + END.strip()


def test_a_pair_is_two_documents_of_which_the_answers_are_scored(data):
    preferences = prepare_preferences(data, "pairs", 500)
    assert list(texts(preferences)) == [
        expected(row["prompt"], row[key]) for row in ROWS for key in ("chosen", "rejected")
    ]
    assert (preferences.units, preferences.kind) == (3, "pairs")
    margins = preferences.margins()
    assert (margins.dtype, margins.tolist()) == (np.float32, [0.5, 0.0, 0.0])
    assert preferences.tokens == preferences.documents.tokens == int(preferences.documents.lengths().sum())
    assert pickle.loads(pickle.dumps(preferences)) == preferences
    once = shared_sizes(preferences.documents, np.arange(3)).sum()
    saved = preferences.facts["saved"]
    assert saved == pytest.approx(once / preferences.tokens) and saved > 0.1
    assert f"would leave out {saved:.1%} of the tokens" in "".join(
        PreferenceReport(**preferences.facts).lines()
    )


def test_a_judged_answer_has_the_next_answer_to_another_prompt_beside_it(data, tmp_path):
    write(tmp_path, LABELS)
    preferences = prepare_preferences(data, "judged", 500)
    others = ["4", "4", "Hello!", "Hello!"]
    assert list(texts(preferences)) == [
        expected(row["prompt"], text)
        for row, other in zip(LABELS, others, strict=True)
        for text in (row["completion"], other)
    ]
    desirable = preferences.desirable()
    assert (desirable.dtype, desirable.tolist()) == (np.bool_, [True, False, True, False])


def test_pairs_as_judged_answers_are_in_the_order_of_trl(data, monkeypatch):
    trl = pytest.importorskip("trl.data_utils")
    datasets = pytest.importorskip("datasets")
    rows = [{"prompt": f"{n} {n % 3}", "chosen": f"a{n}", "rejected": f"b{n}"} for n in range(7)]
    pairs = [(str(n), read_preference(row)) for n, row in enumerate(rows)]
    monkeypatch.setattr(sources, "BLOCK", 3)
    listed = [
        (judged.prompt[0].content, judged.completion[0].content, judged.desirable)
        for _, judged in sources.judged_answers(pairs)
    ]
    peer = trl.unpair_preference_dataset(datasets.Dataset.from_list(rows), batch_size=3)
    assert listed == [(row["prompt"], row["completion"], row["label"]) for row in peer]
    judged = prepare_preferences(data, "judged", 500)
    assert judged.units == 6 and judged.desirable().tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize("prompts", ["aab", "abca", "aabba", "abbbb", "abab", "aabcc"])
def test_the_next_answer_to_another_prompt_is_that_of_a_loop(prompts):
    answers = [
        ("", read_preference({"prompt": prompt, "completion": str(n), "label": True}))
        for n, prompt in enumerate(prompts)
    ]
    plain = []
    for number in range(len(prompts)):
        later = [*range(number, len(prompts)), *range(number)]
        plain.append(str(next(n for n in later if prompts[n] != prompts[number])))
    read = list(sources.with_others(answers))
    assert [record.completion[0].content for _, record, _ in read] == [str(n) for n in range(len(prompts))]
    assert [other.completion[0].content for _, _, other in read] == plain


def test_what_is_too_long_is_left_out_and_counted(data, tmp_path):
    complete = prepare_preferences(data, "pairs", 500)
    sizes = complete.documents.lengths().reshape(-1, 2).sum(axis=1).tolist()
    facts = complete.facts
    assert (facts["count"], facts["left_out"], facts["length"]) == (3, 0, 256)
    length = max(sizes) - 1
    shorter = prepare_preferences(replace(data, sequence_length=length), "pairs", 500)
    assert sorted(shorter.documents.lengths().reshape(-1, 2).sum(axis=1).tolist()) == sorted(sizes)[:2]
    assert (shorter.facts["count"], shorter.facts["left_out"]) == (2, 1)
    assert shorter.facts["longest"] == facts["longest"] and shorter.facts["median"] == facts["median"]
    tokenizer = load_tokenizer(complete.tokenizer)
    rejected = [
        len(tokenizer.encode(row["rejected"] + "<|im_end|>", add_special_tokens=False)) for row in ROWS
    ]
    # the line feed after an answer is no token that is scored, and part of the document
    assert facts["longest"]["rejected"] == max(rejected) + 1
    assert facts["median"]["rejected"] == sorted(rejected)[1] + 1
    assert facts["longest"]["prompt"] == len(tokenizer.encode(BEGIN.format("2+2?"), add_special_tokens=False))
    for row in [ROWS[1]], [LABELS[0]]:
        write(tmp_path, [*row, {**row[0], "prompt": "another"}])
        kind = "pairs" if "chosen" in row[0] else "judged"
        with pytest.raises(DataError, match="no preference to train on") as caught:
            prepare_preferences(replace(data, sequence_length=8), kind, 500)
        assert "increase data.sequence_length = 8" in str(caught.value) and "2 are left out" in str(
            caught.value
        )


def test_a_judged_answer_is_left_out_for_the_longer_of_its_documents(data, tmp_path):
    write(tmp_path, [LABELS[0], {"prompt": "2+2?", "completion": "It is kind. " * 9, "label": True}])
    lengths = prepare_preferences(data, "judged", 500).documents.lengths()
    shorter = replace(data, sequence_length=int(lengths[1]) - 1)
    with pytest.raises(DataError, match="2 are left out"):
        prepare_preferences(shorter, "judged", 500)


def test_second_preparation_reads_the_cache(data, monkeypatch):
    first = prepare_preferences(data, "pairs", 500)
    monkeypatch.setattr(prepare, "_write", None)
    assert prepare_preferences(data, "pairs", 500) == first


@pytest.mark.parametrize(
    "change",
    [{"special_tokens": "parse"}, {"sequence_length": 200}, {"limit_bytes": 40},
     "template", "text", "tokenizer", "kind"],
    ids=str,
)  # fmt: skip
def test_anything_the_files_depend_on_makes_another_entry(change, data, tmp_path):
    first, kind = prepare_preferences(data, "pairs", 500), "pairs"
    if change == "template":
        (tmp_path / "t.jinja").write_text(GENERATION.template)
        data = replace(data, chat_template=str(tmp_path / "t.jinja"))
    elif change == "text":
        write(tmp_path, ROWS[:2])
    elif change == "tokenizer":
        setting(CHATML, "metaspace").tokenizer.save_pretrained(tmp_path / "model")
    elif change == "kind":
        kind = "judged"
    else:
        data = replace(data, **change)
    second = prepare_preferences(data, kind, 500)
    assert second.documents.directory != first.documents.directory
    same_identity = change == {"sequence_length": 200}
    assert ((second.text, second.vocabulary) == (first.text, first.vocabulary)) == same_identity


def test_the_same_bytes_under_another_name_are_the_same_entry(data, tmp_path):
    first = prepare_preferences(data, "pairs", 500)
    (tmp_path / "rows.jsonl").rename(tmp_path / "others.jsonl")
    (tmp_path / "model").rename(tmp_path / "renamed")
    moved = replace(data, source=str(tmp_path / "others.jsonl"), tokenizer=str(tmp_path / "renamed"))
    assert prepare_preferences(moved, "pairs", 500) == first


def test_limit_bytes_ends_with_a_record(data):
    size = sum(len(ROWS[0][key]) for key in ("prompt", "chosen", "rejected"))
    assert prepare_preferences(replace(data, limit_bytes=size), "pairs", 500).units == 1


@pytest.mark.parametrize(
    ("row", "kind", "words"),
    [
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "pairs",
         ('rows.jsonl:4: "chosen" equals', "`cai data check`")),
        (LABELS[0], "pairs", ("rows.jsonl:4: the record is one answer with a label", "kto")),
        ({"prompt": "q", "completion": "a"}, "judged", ('rows.jsonl:4: the record has "prompt"', "`cai data check`")),
        ({"prompt": "q", "chosen": "\n\na", "rejected": "b"}, "pairs", ("rows.jsonl:4: the prompt has other tokens",)),
        ({"prompt": "q", "chosen": [{"role": "assistant", "content": "a", "weight": 0}], "rejected": "b"}, "pairs",
         ("rows.jsonl:4: the conversation has no answer",)),
    ],
)  # fmt: skip
def test_a_broken_record_is_named_by_its_line(row, kind, words, data, tmp_path):
    write(tmp_path, [*ROWS, row])
    with pytest.raises(DataError) as caught:
        prepare_preferences(data, kind, 500)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_one_prompt_alone_has_no_other_answer(data, tmp_path):
    write(tmp_path, LABELS[:2])
    with pytest.raises(DataError, match="have the same prompt"):
        prepare_preferences(data, "judged", 500)


def test_what_is_scored_is_not_chosen(data):
    with pytest.raises(ConfigError, match="other messages than the answers"):
        prepare_preferences(replace(data, trained=("user",)), "pairs", 500)


def test_what_the_model_has_no_row_for(data):
    with pytest.raises(DataError, match="beyond the model's vocabulary"):
        prepare_preferences(data, "pairs", 300)


def test_ids_are_those_that_the_tokenizer_s_template_has(data):
    tokenizer = load_tokenizer(data.tokenizer)
    renderer = Renderer(tokenizer, load_template(tokenizer, None))
    pair = read_preference(ROWS[0])
    example = render_pair(renderer, pair)
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert example.chosen.ids[: example.prefix].tolist() == prompt
    for document, text in ((example.chosen, "Hello!"), (example.rejected, "So long.")):
        whole = [*messages, {"role": "assistant", "content": text}]
        assert document.ids.tolist() == tokenizer.apply_chat_template(whole, return_dict=False)
        assert not document.trained[: example.prefix].any() and document.trained[example.prefix]
    judged = read_preference(LABELS[0])
    assert np.array_equal(render_judged(renderer, judged).ids, example.chosen.ids)
    assert np.array_equal(render_judged(renderer, judged, pair.rejected).ids, example.rejected.ids)


def test_pairs_made_here_tell_nothing_by_length_or_form():
    pairs = list(questions.pairs())
    assert len(pairs) >= 2000 and len({pair["prompt"] for pair in pairs}) == len(pairs)
    assert all(len(pair["chosen"]) == len(pair["rejected"]) for pair in pairs)
    assert sum(pair["chosen"].startswith("It is") for pair in pairs) * 2 == len(pairs)
    assert all(pair["chosen"].startswith("It is") == pair["prompt"].startswith("What") for pair in pairs)
    assert list(questions.pairs()) == pairs


def test_pairs_made_here_need_no_file(data):
    options = replace(data, source=questions.SOURCE, tokenizer="train", limit_bytes=600)
    preferences = prepare_preferences(options, "pairs", 400)
    read = list(texts(preferences))
    assert (
        preferences.units > 5
        and read[0][1].endswith(END.strip())
        and "plus" in "".join(text for text, _ in read)
    )
    assert (
        prepare_preferences(replace(options, tokenizer=str(preferences.tokenizer)), "judged", 400).units > 10
    )
