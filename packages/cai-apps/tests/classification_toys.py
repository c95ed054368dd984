"""Small models of transformers that classify, batches for them, and a plain loop."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import torch
from layouts import BATCH, LENGTH, VOCAB, Case, adamw, rate, run_config
from torch import nn

from cai_apps.applications.classification.config import Config, Data, Model

STEPS, CLASSES = 5, ("cold", "mild", "warm")
HIDDEN = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
QUIETER = {"dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0}
TEXTS = {
    "bert": HIDDEN | QUIET | {"vocab_size": VOCAB, "max_position_embeddings": 32},
    "roberta": HIDDEN | QUIET | {"vocab_size": VOCAB, "max_position_embeddings": 34, "type_vocab_size": 1},
    "distilbert": QUIETER
    | {
        "dim": 32,
        "hidden_dim": 48,
        "n_layers": 4,
        "n_heads": 4,
        "vocab_size": VOCAB,
        "max_position_embeddings": 32,
    },
    "llama": HIDDEN | {"num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 32},
}
PICTURES = {"vit": HIDDEN | QUIET | {"image_size": 8, "patch_size": 4}}
KINDS = TEXTS | PICTURES


def saved(kind: str, directory: Path) -> Path:
    """Write a model of random weights as transformers does; returns its directory."""
    from transformers import (
        AutoConfig,
        AutoModelForImageClassification,
        AutoModelForSequenceClassification,
    )

    names = dict(enumerate(CLASSES))
    options = KINDS[kind] | {"id2label": names, "label2id": {name: n for n, name in names.items()}}
    if kind in TEXTS:
        options |= {"pad_token_id": 1}
    make = AutoModelForSequenceClassification if kind in TEXTS else AutoModelForImageClassification
    torch.manual_seed(5)
    model = make.from_config(AutoConfig.for_model(kind, **options))
    for parameter in model.parameters():  # biases and heads of nothing would hide much
        nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory / kind)
    return directory / kind


def batch(kind: str, step: int) -> dict[str, torch.Tensor]:
    """A global batch: texts of very different lengths, or pictures."""
    random = torch.Generator().manual_seed(1000 + step)
    labels = torch.randint(0, len(CLASSES), (BATCH,), generator=random)
    if kind in PICTURES:
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=random), "labels": labels}
    lengths = torch.randint(3, LENGTH + 1, (BATCH, 1), generator=random)
    mask = (torch.arange(LENGTH) < lengths).long()
    ids = torch.randint(2, VOCAB, (BATCH, LENGTH), generator=random) * mask + (1 - mask)
    rows = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    types = (torch.arange(LENGTH) >= lengths // 2).long() * mask
    return rows | ({"token_type_ids": types} if kind == "bert" else {})


def config_of(directory: Path, case: Case) -> Config:
    """The config of a case, for the model of a directory."""
    base = run_config(case, "fp64", STEPS)
    taken = {
        field.name: getattr(base, field.name) for field in fields(Config) if hasattr(base, field.name)
    } | {
        "application": "classification",
        "model": Model(str(directory), "pretrained"),
        "data": Data(sequence_length=LENGTH),
    }
    return Config(**taken)


def twin(kind: str, directory: Path):
    """Losses and final parameters of a plain loop over transformers' own model."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    make = AutoModelForSequenceClassification if kind in TEXTS else AutoModelForImageClassification
    model = make.from_pretrained(directory, dtype=torch.float64)
    optimizer, losses = adamw(model), []
    for step in range(STEPS):
        rows = batch(kind, step)
        if kind in PICTURES:
            rows["pixel_values"] = rows["pixel_values"].double()
        loss = model(**rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, {name: param.detach().clone() for name, param in model.named_parameters()}


def records(path: Path, count: int = 60, second: bool = False) -> Path:
    """Write texts with classes that their words tell."""
    words = {"cold": "snow ice frost", "mild": "rain cloud wind", "warm": "sun beach sand"}
    lines = []
    for number in range(count):
        label = CLASSES[number % 3]
        one = {"text": " ".join(words[label].split()[: 1 + number % 3] * 2), "label": label}
        lines.append(json.dumps(one | ({"other": f"day {number}"} if second else {})))
    path.write_text("\n".join(lines))
    return path
