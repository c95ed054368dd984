"""Small models of transformers that classify, batches for them, and a plain loop."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields, replace
from pathlib import Path

import torch
from layouts import BATCH, LENGTH, VOCAB, Case, adamw, full, parameters_of, rate, run_config
from torch import nn

from cai_apps.applications.classification.config import Config, Data, Model
from cai_apps.applications.classification.model import config_for, kind_of, pretrained
from cai_apps.applications.classification.workload import workload
from cai_apps.compose.apply import apply
from cai_apps.config.optimizer import OptimizerGroup
from cai_apps.config.sections import LoRA
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index

NONE = LoRA()
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


LAYOUTS = {
    "one": Case(),
    "one-recompute": Case(recompute="full"),
    "one-compiled": Case(compile="on"),
    "one-kernels": Case(kernels="on"),
    "data2-zero2": Case(data=2, zero=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2": Case(tensor=2),
    "pipeline2": Case(pipeline=2),
    "data2-tensor2": Case(data=2, tensor=2, zero=3),
    "tensor2-pipeline2": Case(tensor=2, pipeline=2),
}


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


def config_of(directory: Path, case: Case, lora: LoRA = NONE) -> Config:
    """The config of a case, for the model of a directory."""
    base = run_config(case, "fp64", STEPS)
    taken = {
        field.name: getattr(base, field.name) for field in fields(Config) if hasattr(base, field.name)
    } | {
        "application": "classification",
        "model": Model(str(directory), "pretrained"),
        "data": Data(sequence_length=LENGTH),
        "lora": lora,
    }
    if lora.dora:  # peft's decay would draw lengths to 0, and this one draws them to those of the base
        groups = {"lengths": OptimizerGroup(match="*lora_magnitude_vector*", weight_decay=0.0)}
        taken["optimizer"] = replace(base.optimizer, groups=groups)
    return Config(**taken)


def opened(kind: str, directory: Path) -> nn.Module:
    """The model of a directory as transformers opens it, in float64."""
    from transformers import AutoModelForImageClassification, AutoModelForSequenceClassification

    make = AutoModelForSequenceClassification if kind in TEXTS else AutoModelForImageClassification
    return make.from_pretrained(directory, dtype=torch.float64)


def twin(kind: str, model: nn.Module, without_decay: Collection[str] = ()):
    """Losses and final parameters of a plain loop over transformers' own model, which may have adapters of peft."""
    optimizer, losses = adamw(model), []
    undecayed = [
        p for name, p in model.named_parameters() if name.removeprefix("base_model.model.") in without_decay
    ]
    if undecayed:
        optimizer.param_groups[0]["params"] = [
            p for p in model.parameters() if all(p is not other for other in undecayed)
        ]
        optimizer.add_param_group({"params": undecayed, "weight_decay": 0.0})
    for step in range(STEPS):
        rows = batch(kind, step)
        if kind in PICTURES:
            rows["pixel_values"] = rows["pixel_values"].double()
        loss = model(**rows).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for parameters in optimizer.param_groups:
            parameters["lr"] = rate(step)
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


def trained_session(layout, kind, directory, lora=NONE):
    """A session after its steps, its first weights, and the losses."""
    config = config_of(directory, LAYOUTS[layout], lora)
    model = config_for(str(directory), CLASSES)
    what = kind_of(model, kind)
    names = tuple(name for name in batch(kind, 0) if name != "labels")
    fill = pretrained(str(directory), directory, model, what)
    session = apply(config, workload(config, model, what, names, fill), device=torch.device("cpu"))
    begun = {name: value.clone() for name, value in full(parameters_of(session)).items()}
    share = BATCH // degree(session.mesh, DATA_AXES)
    first, losses = index(session.mesh, DATA_AXES) * share, []
    for step in range(STEPS):
        rows = {name: value[first : first + share] for name, value in batch(kind, step).items()}
        if "pixel_values" in rows:
            rows["pixel_values"] = rows["pixel_values"].double()
        pieces = {name: value.split(config.train.microbatch_size) for name, value in rows.items()}
        microbatches = [
            dict(zip(pieces, values, strict=True)) for values in zip(*pieces.values(), strict=True)
        ]
        loss = session.step(microbatches, total=float(BATCH)).clone()
        session.update(rate(step), float(session.norm()))
        all_reduce(loss, group(session.mesh, DATA_AXES))
        losses.append(float(loss))
    return session, begun, losses
