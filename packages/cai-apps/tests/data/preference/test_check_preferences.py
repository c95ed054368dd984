"""`cai data check` of preferences: what is printed of a file, and the exit code."""

from __future__ import annotations

import json

import pytest
from chat_templates import CHATML, turns
from chat_tokenizers import setting

from cai_apps.cli import main
from cai_apps.run.exit_codes import FAILURE, USER_ERROR

PAIR = {"prompt": "Hi", "chosen": "Hello!", "rejected": "So long."}
JUDGED = [
    {"prompt": "Hi", "completion": "Hello!", "label": True},
    {"prompt": "2+2?", "completion": "5", "label": False},
]
PROMPT = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    setting(CHATML).tokenizer.save_pretrained(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def check(folder, capsys, rows, *arguments, tokenizer=True):
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    model = ("--tokenizer", "model") if tokenizer else ()
    code = main(["data", "check", "rows.jsonl", *model, *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_of_a_pair_the_prompt_is_shown_once_and_both_answers_apart(folder, capsys):
    code, out, _ = check(folder, capsys, [PAIR] * 4)
    assert code == 0
    title = "rows.jsonl:1 (the prompt, chosen between {+ and +}, rejected between {- and -})\n"
    assert f"{title}{PROMPT}{{+Hello!<|im_end|>+}}\n{{-So long.<|im_end|>-}}\n" in out
    assert "rows.jsonl:3" in out and "rows.jsonl:4" not in out
    assert "4 pairs\n" in out and "rejected: half of them up to" in out
    assert "answers end with <|im_end|>\n" in out and out.rstrip().endswith("4 records, none broken")


def test_colours_stand_for_marks(folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = check(folder, capsys, [PAIR])
    assert "\x1b[32mHello!<|im_end|>\x1b[0m" in out and "\x1b[31mSo long.<|im_end|>\x1b[0m" in out
    assert "rejected in red" in out and "{+" not in out


def test_of_a_judged_answer_the_mark_is_the_judgement(folder, capsys):
    code, out, _ = check(folder, capsys, JUDGED)
    assert code == 0
    assert f"{PROMPT}{{+Hello!<|im_end|>+}}" in out and "{-5<|im_end|>-}" in out
    assert "2 judged answers\n" in out and "completion: half of them up to" in out


@pytest.mark.parametrize("tokenizer", [True, False])
def test_every_broken_line_is_told_with_its_number(folder, capsys, tokenizer):
    rows = [
        {"x": 1},
        PAIR,
        '{"prompt"',
        {**PAIR, "rejected": "Hello!"},
        JUDGED[0],
        {**PAIR, "margin": "x"},
        PAIR,
    ]
    code, out, _ = check(folder, capsys, rows, tokenizer=tokenizer)
    assert code == FAILURE
    broken = (
        "1: the record is no preference",
        "rows.jsonl:3",
        '4: "chosen" equals',
        "5: the record is one answer",
        '6: "margin"',
    )
    assert all(words in out for words in broken) and "7 records, 5 broken" in out
    assert ("2 pairs\n" in out) == tokenizer == ("--tokenizer MODEL" not in out)


def test_what_a_template_refuses_is_told_too(folder, capsys):
    code, out, _ = check(folder, capsys, [PAIR, {**PAIR, "rejected": "\n\nSo long."}])
    assert code == FAILURE and "rows.jsonl:2: the prompt has other tokens" in out and "1 pairs\n" in out


def test_judged_answers_to_one_prompt_are_a_problem(folder, capsys):
    code, out, _ = check(folder, capsys, [JUDGED[0], {**JUDGED[0], "label": False}])
    assert code == FAILURE and "have the same prompt" in out


def test_what_is_left_out(folder, capsys):
    rows = [PAIR, {**PAIR, "rejected": "So long, and be kind. " * 5}]
    longest = json.loads(check(folder, capsys, rows[:1], "--json")[1])["lengths"]["longest"]
    length = 2 * longest["prompt"] + longest["chosen"] + longest["rejected"]
    for size, count in ((length, 1), (length - 1, 2)):
        _, out, _ = check(folder, capsys, rows, "--sequence_length", str(size))
        assert f"{count} are left out: both documents of a pair together longer than {size} tokens" in out
        assert f"{2 - count} pairs\n" in out


@pytest.mark.parametrize(
    ("rows", "kind", "count"),
    [([PAIR], "pairs", 1), (JUDGED, "judged", 2), ([turns("Hi", "Hello!")], "conversations", 1),
     ([{**turns("Hi", "Hello!"), "label": "greeting"}], "conversations", 1),
     ([{"x": 1}, '{"', turns("Hi", "Hello!"), PAIR], "conversations", 1)],
)  # fmt: skip
def test_as_one_json_object(folder, capsys, rows, kind, count):
    code, out, _ = check(folder, capsys, rows, "--json")
    facts = json.loads(out)
    assert (facts["kind"], facts["records"], facts["lengths"]["count"]) == (kind, len(rows), count)
    assert (code == FAILURE) == bool(facts["problems"]) == (len(rows) > count)
    if kind == "pairs":
        assert set(facts["lengths"]["longest"]) == {"prompt", "chosen", "rejected"}


def test_the_pairs_made_here_are_shown(folder, capsys):
    assert main(["data", "check", "preferences", "--tokenizer", "model"]) == 0
    assert "2,400 records, none broken" in capsys.readouterr().out


def test_what_is_scored_is_not_chosen(folder, capsys):
    code, _, err = check(folder, capsys, [PAIR], "--trained", "last")
    assert code == USER_ERROR and "other messages than the answers" in err
