"""`cai evaluate`: the published recipe of transformers, plain sums over single texts, and lm-evaluation-harness."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from chat_templates import CHATML
from chat_tokenizers import setting
from engine_toys import small_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from cai_apps.applications.language.windows import windows_of
from cai_apps.cli import main
from cai_apps.run.exit_codes import USER_ERROR

TEXTS = [
    "What is a window? A part of a text that a model reads at once, and that is all that it sees of it. " * 4,
    "Short.",
    "The next begins before its end: 0123456789, ten digits, and so on. É 北京 🙂\n" * 7,
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("evaluate")
    tokenizer = setting(CHATML).tokenizer
    tokenizer.save_pretrained(home / "model")
    torch.manual_seed(0)
    model = small_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64, initializer_range=0.3)
    model.save_pretrained(home / "model")
    (home / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    (home / "one.txt").write_text("\n\n".join(TEXTS))
    return home


def evaluate(capsys, *arguments):
    code = main(["evaluate", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def published(home, length, stride, counted):
    """The loop of transformers' page on the perplexity of models of fixed length, on the three texts as one.

    Args:
        counted: (targets of a window) -> what the mean of its loss is weighted by.
    """
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    encodings = tokenizer("\n\n".join(TEXTS), return_tensors="pt")
    seq_len = encodings.input_ids.size(1)
    nll_sum, n_tokens, prev_end_loc = 0.0, 0, 0
    for begin_loc in range(0, seq_len, stride):
        end_loc = min(begin_loc + length, seq_len)
        trg_len = end_loc - prev_end_loc
        input_ids = encodings.input_ids[:, begin_loc:end_loc]
        target_ids = input_ids.clone()
        target_ids[:, :-trg_len] = -100
        with torch.no_grad():
            neg_log_likelihood = model(input_ids, labels=target_ids).loss
        num_loss_tokens = counted(target_ids)
        nll_sum += float(neg_log_likelihood) * num_loss_tokens
        n_tokens += num_loss_tokens
        prev_end_loc = end_loc
        if end_loc == seq_len:
            break
    return math.exp(nll_sum / n_tokens), n_tokens


@pytest.mark.parametrize(
    ("length", "stride"),
    [(64, 63), pytest.param(64, 32, marks=pytest.mark.matrix), pytest.param(48, 5, marks=pytest.mark.matrix)],
)
def test_perplexity_is_that_of_the_published_recipe(home, length, stride, capsys):
    flags = ("--length", length, "--stride", stride)
    exact, tokens = published(home, length, stride, lambda targets: int((targets[:, 1:] != -100).sum()))
    page, _ = published(home, length, stride, lambda targets: int((targets != -100).sum()) - 1)
    code, joined = evaluate(capsys, home / "model", "--data", home / "texts.jsonl", "--join", *flags)
    _, single = evaluate(capsys, home / "model", "--data", home / "one.txt", "--batch", 3, *flags)
    assert code == 0
    assert joined["targets"] == single["targets"] == tokens
    for numbers in (joined, single):
        assert numbers["perplexity"] == pytest.approx(exact, rel=1e-5)
    if stride == 63:  # the page counts one target of each later window less than its mean is over
        assert joined["perplexity"] == pytest.approx(page, rel=1e-4)
    size = len("\n\n".join(TEXTS).encode())
    assert joined["bits_per_byte"] == pytest.approx(joined["loss"] * tokens / math.log(2) / size)


def test_documents_are_read_apart(home, capsys):
    """Sums over single texts in windows worked out by hand; the likeliest tokens are counted."""
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    total, count, correct = 0.0, 0, 0
    for text in TEXTS:
        ids = torch.tensor(tokenizer(text)["input_ids"])
        for place in range(1, len(ids)):
            start = max(0, -(-(place + 1 - 64) // 32) * 32)
            logits = model(ids[None, start:place]).logits[0, -1].detach()
            total -= float(logits.log_softmax(0)[ids[place]])
            correct += int(logits.argmax() == ids[place])
            count += 1
    _, numbers = evaluate(capsys, home / "model", "--data", home / "texts.jsonl")
    assert (numbers["texts"], numbers["targets"], numbers["length"], numbers["stride"]) == (3, count, 64, 32)
    assert numbers["loss"] == pytest.approx(total / count, rel=1e-5)
    assert numbers["accuracy"] == correct / count
    _, limited = evaluate(capsys, home / "model", "--data", home / "texts.jsonl", "--limit", 1)
    assert limited["texts"] == 1


@pytest.mark.parametrize("size", [1, 2, 7, 8, 9, 30])
@pytest.mark.parametrize(("length", "stride"), [(2, 1), (8, 3), (8, 7)])
def test_windows_predict_each_token_once(size, length, stride):
    counts = np.zeros(size, dtype=int)
    for window in windows_of(np.arange(size), None, length, stride):
        assert not window.targets[0] and len(window.ids) <= length
        counts[window.ids[window.targets]] += 1
    assert counts.tolist() == [0, *[1] * (size - 1)]


PAIRS = [
    {"prompt": "q", "chosen": "yes", "rejected": "no, never"},
    {"prompt": "What is a window?", "chosen": "A part.", "rejected": "A hole in a wall."},
    {"prompt": "1 + 1", "chosen": "2", "rejected": "3"},
]


def log_probability(model, tokenizer, prompt, answer):
    """The sum over the answer's tokens, up to the one that ends it, by the template as transformers writes it."""
    turns = [{"role": "user", "content": prompt}]
    before = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    ids = torch.tensor(tokenizer(before + answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
    size = len(tokenizer(before, add_special_tokens=False)["input_ids"])
    scores = model(ids[None]).logits[0].detach().double().log_softmax(-1)
    return sum(float(scores[place - 1, ids[place]]) for place in range(size, len(ids))), len(ids) - size


def test_preferences_and_answers_are_scored_by_the_template(home, capsys):
    model = AutoModelForCausalLM.from_pretrained(home / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(home / "model")
    sums = [
        [log_probability(model, tokenizer, pair["prompt"], pair[key]) for key in ("chosen", "rejected")]
        for pair in PAIRS
    ]
    (home / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    code, numbers = evaluate(
        capsys, home / "model", "--data", home / "pairs.jsonl", "--format", "preferences"
    )
    assert code == 0 and numbers["pairs"] == 3
    assert numbers["accuracy"] == np.mean([chosen[0] > rejected[0] for chosen, rejected in sums])
    assert numbers["accuracy_per_token"] == np.mean([a[0] / a[1] > b[0] / b[1] for a, b in sums])
    assert numbers["margin"] == pytest.approx(np.mean([a[0] - b[0] for a, b in sums]), rel=1e-4)
    chats = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
    (home / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    _, numbers = evaluate(capsys, home / "model", "--data", home / "chats.jsonl", "--format", "chat")
    assert numbers["targets"] == sum(chosen[1] for chosen, _ in sums)
    assert numbers["loss"] == pytest.approx(
        -sum(chosen[0] for chosen, _ in sums) / numbers["targets"], rel=1e-5
    )


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ((), "neither"),
        (("--data", "a", "--lm-eval", "x"), "both"),
        (("--data", "one.txt", "--stride", "64"), "at most 63"),
        (("--data", "one.txt", "--length", "65"), "at most 64"),
        (("--data", "one.txt", "--fewshot", "2"), "--fewshot is not for data"),
        (("--data", "chats.jsonl", "--format", "chat", "--join"), "--join is not for"),
        (("--data", "nowhere.txt"), "matches no file"),
        (("--data", "empty.txt"), "nothing to predict"),
    ],
)
def test_what_cannot_be_measured_is_refused(home, flags, told, capsys, monkeypatch):
    monkeypatch.chdir(home)
    (home / "empty.txt").write_text("")
    assert main(["evaluate", "model", *flags]) == USER_ERROR
    assert told in capsys.readouterr().err


def test_the_harness_is_named_where_it_is_missing(home, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["evaluate", str(home / "model"), "--lm-eval", "hellaswag"]) == USER_ERROR
    assert "pip install 'cai-apps[evaluation]'" in capsys.readouterr().err


TASKS = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{label}}",
        "doc_to_choice": "{{choices}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{question}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "written": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{choices[0]}}",
        "generation_kwargs": {"until": ["\n", "a"], "max_gen_toks": 8},
        "metric_list": [{"metric": "exact_match"}],
    },
}
QUESTIONS = [
    {"question": question * count, "choices": [" yes", " no, never", " perhaps "], "label": label}
    for label, (question, count) in enumerate((("Is it so? ", 1), ("A long question. ", 30), ("Q:", 1)))
]


@pytest.fixture(scope="module")
def tasks(home):
    yaml = pytest.importorskip("yaml")
    folder = home / "tasks"
    folder.mkdir()
    (home / "questions.jsonl").write_text("\n".join(map(json.dumps, QUESTIONS)))
    for name, task in TASKS.items():
        files = {"data_files": {"test": str(home / "questions.jsonl")}, "cache_dir": str(home / "hf")}
        common = {
            "task": f"cai_{name}",
            "dataset_path": "json",
            "dataset_kwargs": files,
            "test_split": "test",
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(common | task))
    return folder


@pytest.mark.matrix
def test_tasks_have_the_numbers_of_the_harness_own_model(home, tasks, capsys):
    """The harness's own `hf` model beside ours on three tasks, one of each kind of request."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    names = [f"cai_{name}" for name in TASKS]
    expected = lm_eval.simple_evaluate(
        "hf",
        model_args={"pretrained": str(home / "model"), "dtype": "float32", "max_length": 64, "device": "cpu"},
        tasks=names,
        task_manager=TaskManager(include_path=str(tasks)),
        bootstrap_iters=0,
    )
    flags = [part for name in names for part in (name,)]
    capsys.readouterr()
    code, numbers = evaluate(
        capsys, home / "model", "--task-folder", tasks, "--length", 64, "--lm-eval", *flags
    )
    assert code == 0
    for name in names:
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert numbers[name][metric] == pytest.approx(value, rel=1e-4), (name, metric)
    answers = [sample["resps"] for sample in expected["samples"]["cai_written"]]
    assert any(answer[0][0] for answer in answers)
