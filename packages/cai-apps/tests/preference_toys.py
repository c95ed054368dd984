"""Preferences of random tokens, and the plain loop over single texts that every layout must equal."""

from __future__ import annotations

import copy
import math
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import torch
from layouts import BATCH, Case, adamw, model_config, rate, run_config
from torch import nn
from torch.nn.functional import logsigmoid

from cai_apps.applications.alignment.config import Alignment, Config, Data, Reference
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import causal_model, initializer
from cai_apps.compose.value_head import reward_model
from cai_apps.data.batches import Batches
from cai_apps.data.documents import describe, open_documents, write_documents
from cai_apps.data.preference.prepare import Preferences
from cai_apps.data.preference.rows import PreferenceRows
from cai_kernels import convert_to_fp8

UNITS, LENGTH, VOCAB, SEED, STEPS = 70, 24, 96, 7, 3
MARGIN, SMOOTHING = 0.4, 0.2
OPTIONS = {
    "reward": {"center": 0.05},
    "dpo": {},
    "cdpo": {"label_smoothing": SMOOTHING},
    "dpo-shared": {"share_prompts": True},
    "reward-shared": {"center": 0.05, "share_prompts": True},
    "dpo-hinge": {"beta": 0.5},
    "dpo-robust": {"label_smoothing": SMOOTHING},
    "ipo": {"beta": 0.3},
    "ipo-sum": {"beta": 0.3},
    "simpo": {"margin": MARGIN},
    "orpo": {"beta": 0.7},
    "kto": {"beta": 0.5, "desirable_weight": 1.3, "undesirable_weight": 0.6},
}
"""Options of the algorithms; "cdpo" is dpo with label smoothing, "-shared" one whose pairs share their prompts."""


def texts(kind: str) -> list[tuple[tuple[list[int], int], tuple[list[int], int], float]]:
    """Units of two documents, each ids and where its answer begins, and a margin or whether the first is desirable."""
    random = torch.Generator().manual_seed(5)

    def draw(least: int, most: int) -> list[int]:
        count = int(torch.randint(least, most + 1, (), generator=random))
        return torch.randint(0, VOCAB, (count,), generator=random).tolist()

    units = []
    for _ in range(UNITS):
        prompt, number = draw(1, 4), float(torch.rand((), generator=random))
        answers = [(prompt + draw(1, 6), len(prompt)) for _ in range(2)]
        units.append((*answers, number if kind == "pairs" else float(number > 0.5)))
    return units


def preferences(directory: Path, kind: str) -> Preferences:
    """Write the units as files."""
    directory.mkdir(parents=True)
    units = texts(kind)
    documents = [
        (np.array(ids), np.arange(len(ids)) >= first) for one, two, _ in units for ids, first in (one, two)
    ]
    count, tokens = write_documents(directory, documents, "uint16")
    numbers = np.array([number for *_, number in units])
    if kind == "pairs":
        numbers.astype(np.float32).tofile(directory / "margins.bin")
    else:
        numbers.astype(np.bool_).tofile(directory / "desirable.bin")
    describe(directory, {"text": "t", "vocabulary": "v", "dtype": "uint16"}, count, tokens, 0)
    return Preferences(open_documents(directory), kind)


def rows_of(directory: Path, kind: str) -> PreferenceRows:
    return PreferenceRows.of(preferences(directory, kind), np.arange(UNITS), LENGTH)


ONE = Case()


def config_of(algorithm: str, case: Case = ONE, form: str = "computed", steps: int = STEPS) -> Config:
    base = run_config(replace(case, documents=True), "fp32" if case.linear == "fp8" else "fp64", steps)
    name = "dpo" if algorithm == "cdpo" else algorithm.removesuffix("-shared")
    taken = {field.name: getattr(base, field.name) for field in fields(base)}
    taken |= {"application": "alignment", "data": Data(sequence_length=LENGTH, boundaries="keep")}
    alignment = Alignment(algorithm=name, **OPTIONS[algorithm])
    return Config(**taken, alignment=alignment, reference=Reference(form=form))


def units_of_steps(rows: PreferenceRows, steps: int = STEPS) -> list[list[int]]:
    """The numbers of the units that each step takes."""
    batches = Batches(rows, BATCH, BATCH, 0, 1, seed=SEED)
    numbers = [batches.at(step * BATCH)[0]["number"] for step in range(steps)]
    return [number[number >= 0].tolist() for number in numbers]


def initial(algorithm: str, name: str = "llama", dtype: torch.dtype = torch.float64) -> nn.Module:
    make = reward_model if algorithm.startswith("reward") else causal_model
    with torch.device("meta"):
        model = make(model_config(name))
    return materialize(model, initializer, seed=SEED, dtype=dtype, device=torch.device("cpu"))


def said(model: nn.Module, text: tuple[list[int], int], algorithm: str) -> torch.Tensor:
    """What a model says of one text: its sum or mean of log-probabilities of the answer, or the value at its end."""
    ids, first = text
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
    if algorithm.startswith("reward"):
        return logits[-1, 0]
    tokens = [logits[place - 1].log_softmax(-1)[ids[place]] for place in range(first, len(ids))]
    total = torch.stack(tokens).sum()
    return total / len(tokens) if algorithm in ("ipo", "simpo", "orpo") else total


def loss_by_hand(algorithm: str, one, two, ref_one, ref_two, number: float, kl: float) -> torch.Tensor:
    """The loss of a unit, written from the papers; `number` is its margin, or whether its answer is desirable."""
    beta = OPTIONS[algorithm].get("beta", 0.1)
    algorithm = algorithm.removesuffix("-shared")
    if algorithm == "reward":
        return -logsigmoid(one - two - number) + 0.05 * (one + two) ** 2
    if algorithm == "simpo":
        return -logsigmoid(2 * one - 2 * two - MARGIN)
    if algorithm == "orpo":
        odds = [score - torch.log(1 - torch.exp(score)) for score in (one, two)]
        return -one - beta * logsigmoid(odds[0] - odds[1])
    if algorithm == "kto":
        ratio = beta * (one - ref_one - max(kl, 0.0))
        return 1.3 * (1 - torch.sigmoid(ratio)) if number else 0.6 * (1 - torch.sigmoid(-ratio))
    h = (one - ref_one) - (two - ref_two)
    if algorithm in ("ipo", "ipo-sum"):
        return (h - 1 / (2 * beta)) ** 2
    if algorithm == "dpo-hinge":
        return torch.relu(1 - beta * h)
    right, wrong = -logsigmoid(beta * h), -logsigmoid(-beta * h)
    if algorithm == "cdpo":
        return (1 - SMOOTHING) * right + SMOOTHING * wrong
    if algorithm == "dpo-robust":
        return ((1 - SMOOTHING) * right - SMOOTHING * wrong) / (1 - 2 * SMOOTHING)
    return right


def twin(
    algorithm: str, rows: PreferenceRows, name: str = "llama", steps: int = STEPS, linear: str = "compute"
):
    """Losses, first gradients and last weights of a plain loop over single texts."""
    model = initial(algorithm, name, torch.float32 if linear == "fp8" else torch.float64)
    if linear == "fp8":
        convert_to_fp8(model, scaling="row")
    reference, optimizer = copy.deepcopy(model).requires_grad_(False), adamw(model)
    units, losses, first = texts("judged" if algorithm == "kto" else "pairs"), [], {}
    for step, numbers in enumerate(units_of_steps(rows, steps)):
        kl = 0.0
        if algorithm == "kto":
            with torch.no_grad():
                others = [units[n][1] for n in numbers]
                ratios = [said(model, o, algorithm) - said(reference, o, algorithm) for o in others]
            kl = float(torch.stack(ratios).mean())
        loss = 0.0
        for number in numbers:
            one, two, margin = units[number]
            scores = [said(m, text, algorithm) for m in (model, reference) for text in (one, two)]
            part = loss_by_hand(algorithm, *scores, np.float32(margin).item(), kl) / len(numbers)
            part.backward()
            loss += part.item()
        first = first or {n: p.grad.clone() for n, p in model.named_parameters()}
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = rate(step)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss)
    assert all(map(math.isfinite, losses))
    return losses, first, {n: p.detach().clone() for n, p in model.named_parameters()}
