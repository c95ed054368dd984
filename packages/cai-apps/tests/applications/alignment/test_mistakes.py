"""What goes wrong first when one learns from preferences: said with advice, before a rank starts or memory is taken."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoConfig
from trl_toys import LINES, PAIRS, judged, pair, write_model, write_records

from cai_apps.cli import main
from cai_apps.compose import materialize

OPTIONS = {
    "model.weights": "pretrained",
    "data.sequence_length": 96,
    "data.validation_fraction": 0.0,
    "log.sample_tokens": 0,
    "train.steps": 1,
    "train.global_batch": 1,
    "train.microbatch_size": 1,
    "train.validate_every": 0,
    "train.device": "cpu",
    "parallel.shard": 1,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return tmp_path_factory.mktemp("mistakes")


@pytest.fixture(scope="module")
def base(home):
    return write_model(home / "base", 1)


@pytest.fixture
def refused(home, base, tmp_path, monkeypatch, capsys):
    """A function of a recipe, records and options, which returns the error that the command shows."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("memory is taken")

    monkeypatch.setattr("cai_apps.run.train.launch", start)
    monkeypatch.setattr(materialize, "materialize", start)

    def error(recipe: str, records: list[dict[str, Any]] | None = None, code: int = 2, **more: Any) -> str:
        good = [pair(*texts) for texts in PAIRS]
        file = write_records(tmp_path / "records.jsonl", good if records is None else records)
        values = OPTIONS | {"model.name": base, "data.source": file, "data.cache": home / "cache"}
        values |= {"log.directory": tmp_path / "run"}
        values |= {key.replace("__", "."): value for key, value in more.items()}
        capsys.readouterr()
        assert main(["train", recipe, *(f"--{key}={value}" for key, value in values.items())]) == code
        assert code == 1 or not (tmp_path / "run").exists()
        return capsys.readouterr().err

    return error


def assert_said(error: str, **fields: str) -> None:
    """Compare an error with what it is to say: `what` in its first line, and fields in theirs."""
    first, *lines = error.splitlines()
    parts = dict(line.strip().split(":", 1) for line in lines if ":" in line)
    parts["what"] = first
    for name, text in fields.items():
        assert text in parts.get(name, ""), error


SAME = pair("Hello!", "Hello there!", "Hello there!")
EMPTY = pair("Hello!", "Hello there!", "")
DIFFERENT = {
    side: [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    for side, question, answer in (("chosen", "Hi?", "Hi."), ("rejected", "Bye?", "Bye."))
}
UNLABELLED = {"prompt": judged([True])[0]["prompt"], "completion": [{"role": "assistant", "content": "Hi."}]}


@pytest.mark.parametrize(
    ("recipe", "record", "fields"),
    [
        ("dpo-tiny", SAME, {"what": '"chosen" equals "rejected"', "fix": "leave out the record"}),
        ("rm-tiny", EMPTY, {"what": '"rejected": the answer is empty', "fix": "leave out"}),
        ("dpo-tiny", DIFFERENT, {"what": "prompts that differ", "expected": "the same messages up to the answers"}),
        ("kto-tiny", UNLABELLED, {"what": 'no "label"', "fix": "add 'label'"}),
        ("dpo-tiny", judged([True])[0], {"what": "one answer with a label, not a pair", "fix": '"kto"'}),
    ],
    ids=["equal answers", "an empty answer", "other prompts", "no label", "no pair"],
)  # fmt: skip
def test_a_broken_record_is_named_by_its_line(recipe, record, fields, refused):
    good = judged([True, False]) if recipe == "kto-tiny" else [pair(*texts) for texts in PAIRS[:2]]
    error = refused(recipe, [*good, record])
    assert_said(error, **fields)
    assert "records.jsonl:3: " in error.splitlines()[0]


@pytest.mark.parametrize(
    ("algorithm", "option", "value", "read"),
    [
        ("dpo", "margin", 0.5, "beta, label_smoothing"),
        ("dpo", "center", 0.1, "beta, label_smoothing"),
        ("ipo", "label_smoothing", 0.1, "beta"),
        ("dpo-hinge", "label_smoothing", 0.1, "beta"),
        ("reward", "beta", 0.2, "center"),
        ("simpo", "desirable_weight", 2.0, "beta, margin"),
        ("orpo", "margin", 1.0, "beta"),
        ("kto", "center", 0.1, "beta, desirable_weight, undesirable_weight"),
        ("kto", "share_prompts", True, "beta, desirable_weight, undesirable_weight"),
    ],
)
def test_options_that_an_algorithm_does_not_read(algorithm, option, value, read, refused):
    error = refused("dpo-tiny", alignment__algorithm=algorithm, **{f"alignment__{option}": value})
    assert_said(
        error,
        what=f"alignment.algorithm '{algorithm}' has no {option}",
        got=f"alignment.{option} = {value}",
        expected=f"options among {read}",
        fix=f"leave alignment.{option} out",
    )


def test_a_shared_prompt_has_no_noise_of_its_own(refused):
    error = refused("dpo-tiny", alignment__share_prompts=True, model__neftune_alpha=5.0)
    assert_said(
        error, what="one noise for both answers", got="neftune_alpha = 5.0", fix="leave one of them out"
    )


def test_references_that_there_are_not(refused, base):
    error = refused("dpo-tiny", reference__form="adapter")
    assert_said(error, what="it has none", got="lora.rank = 0", fix="set lora.rank, or reference.form")
    error = refused("simpo-tiny", reference__model=base)
    assert_said(error, what="'simpo' has no reference model", fix="leave [reference] out")
    error = refused("dpo-tiny", reference__form="adapter", reference__model=base, lora__rank=4)
    assert_said(error, what="two references at once", fix="leave one of them out")


def test_a_reference_with_another_tokenizer(refused, home):
    other = write_model(home / "other", 2)
    file = other / "tokenizer.json"
    rules = json.loads(file.read_text())
    merges = rules["model"]["merges"]
    merges[0], merges[1] = merges[1], merges[0]
    file.write_text(json.dumps(rules))
    error = refused("dpo-tiny", reference__model=other)
    assert_said(error, what="the tokenizer of the reference model is not that", got=str(other))
    assert_said(error, fix="take a reference with the same tokenizer, or leave reference.model out")


def test_a_reference_with_another_template_has_the_same_tokenizer(refused, home):
    """It reads the ids that the model that learns reads, so its own template says nothing."""
    other = write_model(home / "lines", 2, template=LINES)
    assert "memory is taken" in refused("dpo-tiny", code=1, reference__model=other)


def test_a_reference_that_cannot_read_what_the_model_reads(refused, home):
    other = write_model(home / "mixing", 2, kind="mamba")
    error = refused("dpo-tiny", reference__model=other)
    assert_said(error, what=f"nothing shows that {other} keeps apart", fix="take another model")
    other = write_model(home / "smaller", 2, padding=None, vocab_size=368)
    error = refused("dpo-tiny", reference__model=other)
    assert_said(
        error,
        what="the reference model has no embedding of a token",
        expected="ids below its vocab_size = 368",
        fix="take a reference with as many embeddings",
    )


def test_a_kind_that_has_no_reward_model(refused, tmp_path, base):
    directory = tmp_path / "granite"
    AutoConfig.for_model(
        "granite", hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, vocab_size=640,
    ).save_pretrained(directory)  # fmt: skip
    error = refused("rm-tiny", model__name=directory, model__weights="random", data__tokenizer=base)
    assert_said(
        error,
        what="no reward model of model_type 'granite'",
        cause="no ...ForSequenceClassification",
        fix="take a model of another kind",
    )


@pytest.mark.parametrize("recipe", ["dpo-tiny", "sft-tiny"])
def test_records_of_another_kind_are_refused_before_a_base_is_trained(tmp_path, capsys, recipe):
    record = {"dpo-tiny": judged([True])[0], "sft-tiny": {"prompt": "q", "chosen": "a"}}[recipe]
    (tmp_path / "records.jsonl").write_text(json.dumps(record))
    options = {
        "data.source": tmp_path / "records.jsonl",
        "data.cache": tmp_path / "cache",
        "train.device": "cpu",
    }
    options["log.directory"] = tmp_path / "run"
    assert main(["train", recipe, *(f"--{key}={value}" for key, value in options.items())]) == 2
    shown = capsys.readouterr()
    assert "records.jsonl:1" in shown.err and "trained first" not in shown.out


def test_a_reward_model_writes_no_text(tmp_path, capsys):
    model = write_model(tmp_path / "model", 1, labels=1)
    assert main(["generate", str(model), "--prompt", "Hello"]) == 2
    assert "judges texts and writes none" in capsys.readouterr().err
