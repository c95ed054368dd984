"""A model that learns: held-out sums after `cai train` beside a plain loop from the same weights, and shuffled answers.

An answer counts where every token of it is the likeliest, its end too. Rows of cai hold two conversations each; those
of the loop hold one, with padding.
"""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from cai_apps.cli import main
from cai_apps.data.chat.tokenizer import END, train_text_tokenizer

NUMBERS = range(10)
SUMS = ("What is {} + {}?", "{} plus {}", "Add {} to {}.", "Sum: {} and {}")
NEXT = "What comes after {} + {}?"
HELD_OUT, STEPS, RATE, CONVERSATIONS = 120, 200, 8e-3, 64
CHANCE = 0.2
"""Of a hundred sums the most frequent one is ten; a model that has seen few of them does little better."""


class Sum(NamedTuple):
    question: str
    answer: int


def sums(forms: tuple[str, ...], more: int = 0) -> list[Sum]:
    """All sums in some forms, in an order that mixes them."""
    asked = [Sum(form.format(a, b), a + b + more) for form in forms for a in NUMBERS for b in NUMBERS]
    random.Random(0).shuffle(asked)
    return asked


def shuffled(asked: list[Sum]) -> list[Sum]:
    """The questions with each other's answers."""
    answers = [each.answer for each in asked]
    random.Random(1).shuffle(answers)
    return [each._replace(answer=answer) for each, answer in zip(asked, answers, strict=True)]


def ids_and_labels(tokenizer, asked: list[Sum]) -> tuple[torch.Tensor, torch.Tensor]:
    """Padded rows of one conversation each, by transformers alone."""
    rows = []
    for each in asked:
        turn = [{"role": "user", "content": each.question}]
        prompt = tokenizer.apply_chat_template(turn, tokenize=False, add_generation_prompt=True)
        given, answer = (tokenizer(text)["input_ids"] for text in (prompt, f"{each.answer}{END}"))
        rows.append((given + answer, [-100] * len(given) + answer))
    length = max(len(ids) for ids, _ in rows)
    filled = [
        [values + [fill] * (length - len(values)) for values, fill in zip(row, (0, -100), strict=True)]
        for row in rows
    ]
    return torch.tensor([ids for ids, _ in filled]), torch.tensor([labels for _, labels in filled])


def share_right(directory: Path, asked: list[Sum]) -> float:
    """The share of exact answers of the model of a directory."""
    model = AutoModelForCausalLM.from_pretrained(directory).eval()
    ids, labels = ids_and_labels(AutoTokenizer.from_pretrained(directory), asked)
    with torch.no_grad():
        likeliest = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
    return float(((likeliest == labels[:, 1:]) | (labels[:, 1:] == -100)).all(1).double().mean())


def plain_loop(start: Path, asked: list[Sum], directory: Path) -> Path:
    """Train the model of a directory in one process, as anybody would."""
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(start).train(),
        AutoTokenizer.from_pretrained(start),
    )
    ids, labels = ids_and_labels(tokenizer, asked)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
    order = torch.Generator().manual_seed(3)
    for step in range(STEPS):
        fallen = 0.1 + 0.9 * (1 + math.cos(math.pi * step / STEPS)) / 2
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 10) * fallen
        chosen = torch.randperm(len(ids), generator=order)[:CONVERSATIONS]
        logits = model(input_ids=ids[chosen], use_cache=False).logits[:, :-1].flatten(0, 1)
        nn.functional.cross_entropy(logits, labels[chosen, 1:].flatten()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def cai(start: Path, asked: list[Sum], run: Path, *more: str, rows: int = CONVERSATIONS // 2) -> Path:
    """Train the model of a directory by the command; return the export."""
    file = run.with_suffix(".jsonl")
    turns = ({"prompt": each.question, "completion": str(each.answer)} for each in asked)
    file.write_text("".join(json.dumps(turn) + "\n" for turn in turns))
    options = {
        "model.name": start, "model.weights": "pretrained", "data.source": file, "data.validation_fraction": 0.0,
        "data.sequence_length": 64, "data.cache": run.parent / "cache", "train.steps": STEPS,
        "train.global_batch": rows, "train.microbatch_size": rows, "optimizer.lr": RATE,
        "train.device": "cpu", "train.validate_every": 0, "log.directory": run, "log.sample_tokens": 0,
        "parallel.zero": 0, "checkpoint.final": "false",
    }  # fmt: skip
    flags = [text for key, value in options.items() for text in (f"--{key}", str(value))]
    assert main(["train", "sft-tiny", *flags, *more]) == 0
    return run / "export"


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A model that has learned nothing, and its tokenizer."""
    directory = tmp_path_factory.mktemp("start")
    tokenizer = train_text_tokenizer([*SUMS, NEXT, *"0123456789"], 300)
    config = AutoConfig.for_model(
        "llama", vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=256, initializer_range=0.06,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def plain(start, tmp_path_factory) -> Path:
    """That model after the plain loop."""
    return plain_loop(start, sums(SUMS)[HELD_OUT:], tmp_path_factory.mktemp("plain"))


def test_held_out_answers_rise_as_in_the_plain_loop(start, plain, tmp_path):
    held_out, trained_on = sums(SUMS)[:HELD_OUT], sums(SUMS)[HELD_OUT:]
    assert share_right(start, held_out) < CHANCE
    theirs, ours = (
        share_right(plain, held_out),
        share_right(cai(start, trained_on, tmp_path / "run"), held_out),
    )
    assert min(ours, theirs) > 0.9
    assert ours == pytest.approx(theirs, abs=0.08)


def test_adapters_teach_a_trained_model_another_task(plain, tmp_path):
    pytest.importorskip("peft")
    held_out, trained_on = sums((NEXT,), more=1)[:40], sums((NEXT,), more=1)[40:]
    assert share_right(plain, held_out) < CHANCE
    adapted = cai(plain, trained_on, tmp_path / "run", "--lora.rank", "16", rows=16)
    assert share_right(adapted, held_out) > 0.85


def test_shuffled_answers_teach_nothing(start, tmp_path):
    held_out, mixed = sums(SUMS)[:HELD_OUT], shuffled(sums(SUMS)[HELD_OUT:])
    assert share_right(plain_loop(start, mixed, tmp_path / "plain"), held_out) < CHANCE
    assert share_right(cai(start, mixed, tmp_path / "run"), held_out) < CHANCE
