"""`cai data check`: what is printed of a file, and the exit code."""

from __future__ import annotations

import json

import pytest
from chat_templates import CHATML, GEMMA, WITH_CALL, turns
from chat_tokenizers import setting, tokenizer_of

from cai_apps.cli import main
from cai_apps.run.exit_codes import FAILURE, USER_ERROR

GOOD = [turns("Hi", "Hello!"), turns("é\x1b[31m", "\x1b]0;title\x07So long.\u202e"), {"prompt": "1", "completion": "2"},
        turns("a fourth", "answer")]  # fmt: skip
BAD = [
    '{"messages"',
    '{"messages": [{"role": "usr", "content": "a"}]}',
    json.dumps(WITH_CALL),
    json.dumps({"x\x1b": 1}),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    setting(CHATML).tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "good.jsonl").write_text("\n".join(map(json.dumps, GOOD)))
    (tmp_path / "bad.jsonl").write_text("\n".join([json.dumps(GOOD[0]), "", *BAD, json.dumps(GOOD[1])]))
    monkeypatch.chdir(tmp_path)
    for name in ("NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def check(capsys, *arguments):
    code = main(["data", "check", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize("flag", ["--tokenizer", "--model.name", "--data.tokenizer"])
def test_three_are_shown_with_marks_around_what_is_trained_on(folder, capsys, flag):
    code, out, _ = check(capsys, "good.jsonl", flag, "model")
    assert code == 0
    assert (
        "good.jsonl:1 (trained on: between {+ and +})\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
        in out
    )
    assert "{+Hello!<|im_end|>+}" in out and "good.jsonl:3" in out and "good.jsonl:4" not in out
    assert "4 conversations of" in out and "answers end with <|im_end|>\n" in out
    assert out.rstrip().endswith("4 records, none broken")


def test_every_broken_line_is_told_with_its_number(folder, capsys):
    code, out, _ = check(capsys, "bad.jsonl", "--tokenizer", "model")
    assert code == FAILURE
    told = (
        "3",
        "4: message 1 has an unknown role",
        "5: the tokenizer's chat template writes no tools",
        "6: the record is",
    )
    assert all(f"bad.jsonl:{words}" in out for words in told)
    assert "2 conversations of" in out and "6 records, 4 broken" in out


@pytest.mark.parametrize("colour", [False, True])
def test_what_steers_a_terminal_is_written_out(folder, capsys, monkeypatch, colour):
    if colour:
        monkeypatch.setenv("FORCE_COLOR", "1")
    for name in ("good.jsonl", "bad.jsonl"):
        _, out, err = check(capsys, name, "--tokenizer", "model")
        rest = out + err
        for own in ("\x1b[1m", "\x1b[0m", "\x1b[32m"):
            assert (own in rest) == colour or name == "bad.jsonl"
            rest = rest.replace(own, "")
        assert not {"\x1b", "\x07", "\u202e"} & set(rest)
        assert "\\x1b" in rest


def test_colours_stand_for_marks_and_no_color_is_respected(folder, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, out, _ = check(capsys, "good.jsonl", "--tokenizer", "model")
    assert "\x1b[32mHello!<|im_end|>\x1b[0m" in out and "{+" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    _, out, _ = check(capsys, "good.jsonl", "--tokenizer", "model")
    assert "{+Hello!<|im_end|>+}" in out and "\x1b" not in out


def test_what_is_cut_and_what_is_trained_on(folder, capsys):
    _, out, _ = check(
        capsys,
        "good.jsonl",
        "--model.name",
        "model",
        "--data.sequence_length",
        "15",
        "--data.trained",
        "last",
    )
    assert "are cut at 15 tokens" in out and "dropped" in out


def test_without_a_tokenizer_the_form_is_looked_at(folder, capsys):
    code, out, _ = check(capsys, "bad.jsonl")
    assert code == FAILURE
    assert "--tokenizer MODEL" in out and "bad.jsonl:5" not in out and "6 records, 3 broken" in out
    assert check(capsys, "good.jsonl")[0] == 0


def test_as_one_json_object(folder, capsys):
    code, out, _ = check(capsys, "bad.jsonl", "--tokenizer", "model", "--json")
    facts = json.loads(out)
    assert code == FAILURE
    assert (facts["records"], facts["lengths"]["count"], len(facts["problems"])) == (6, 2, 4)


def test_an_end_that_generation_does_not_stop_at_is_told(folder, capsys):
    setting(GEMMA).tokenizer.save_pretrained(folder / "gemma")
    _, out, _ = check(capsys, "good.jsonl", "--tokenizer", "gemma")
    assert "answers end with <end_of_turn>; the tokenizer's own end is <eos>" in out


def test_a_file_that_cannot_be_read_on_is_a_problem(folder, capsys):
    (folder / "list.json").write_text(json.dumps(GOOD, indent=1)[:-5])
    code, out, _ = check(capsys, "list.json", "--tokenizer", "model")
    assert code == FAILURE and "broken JSON at list.json:" in out and "3 conversations of" in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing.jsonl",), ("matches no file: nothing.jsonl",)),
        (("good.csv",), ("matches no file",)),
        (("empty.jsonl",), ("no record in empty.jsonl",)),
        (("good.jsonl", "--tokenizer", "nothing"), ("no tokenizer 'nothing'",)),
        (("good.jsonl", "--tokenizer", "base"), ("no chat template", "data.chat_template")),
        (("good.jsonl", "--tokenizer", "model", "--chat_template", "no.jinja"), ("no.jinja cannot be read",)),
        (
            ("good.jsonl", "--tokenizer", "model", "--trained", "usr"),
            ("unknown role 'usr'", "did you mean 'user'"),
        ),
        (("good.jsonl", "--tokenizer", ""), ("tokenizer",)),
        (("good.jsonl", "--sequence_length", "0"), ("--sequence-length is too small",)),
        (("good.jsonl", "--sequence-lenght", "9"), ("no option", "sequence_length")),
        ((), ("cannot read its arguments",)),
    ],
)
def test_what_cannot_be_done_is_an_error_of_the_user(folder, capsys, arguments, words):
    (folder / "empty.jsonl").write_text("\n\n")
    tokenizer_of("bytes", CHATML.tokens, eos=CHATML.eos).save_pretrained(folder / "base")
    code, _, err = check(capsys, *arguments)
    assert code == USER_ERROR
    assert all(word in err for word in words), err
