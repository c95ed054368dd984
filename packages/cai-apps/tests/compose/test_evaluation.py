"""Evaluation under every layout: loss, targets that are predicted right, and predictions are those of a plain model."""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace

import pytest
import torch
from layouts import BATCH, LENGTH, Case, batch, documents, model_config, run_config, session_of
from torch.nn import functional as F

from cai_apps.applications.language.prompts import Prompts
from cai_apps.applications.language.task import workload
from cai_apps.compose.apply import apply
from cai_apps.compose.materialize import materialize
from cai_apps.compose.models import initializer, meta_model
from cai_mesh.comm import DATA_AXES, all_reduce, degree, group, index
from cai_mesh.testing import run_ranks

LAYOUTS = {
    "one": Case(),
    "data2-zero0": Case(data=2, zero=0),
    "data2-zero1": Case(data=2),
    "data2-zero3": Case(data=2, zero=3),
    "data2-zero3-kernels": Case(data=2, zero=3, kernels="on"),
    "data2-zero3-documents": Case(data=2, zero=3, documents=True),
    "tensor2": Case(tensor=2),
    "tensor2-kernels": Case(tensor=2, kernels="on"),
    "tensor2-sequence-documents": Case(tensor=2, sequence=True, documents=True),
    "pipeline2": Case(pipeline=2),
    "pipeline2-documents": Case(pipeline=2, documents=True),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", unshard="step"),
    "one-compiled": Case(compile="on"),
    "one-on-the-host": Case(mode="host"),
    "tensor4-2d": Case(tensor=4, mode="2d"),
    "2x2x2-zero1": Case(data=2, tensor=2, pipeline=2),
}


@functools.cache
def plain_model():
    return materialize(
        meta_model(model_config("llama")),
        initializer,
        seed=7,
        dtype=torch.float64,
        device=torch.device("cpu"),
    ).eval()


@functools.cache
def plain(in_documents: bool):
    """A batch of which half of the targets are the likeliest tokens, with its loss, their count and all predictions."""
    model = plain_model()
    ids, more = batch(0)[0], documents(0)[1] if in_documents else {}
    predicted = torch.empty_like(ids)
    logits = torch.empty(BATCH, LENGTH, 96, dtype=torch.float64)
    with torch.no_grad():
        for row in range(BATCH):
            places = more["cu_seqlens"][row].unique().tolist() if in_documents else [0, LENGTH]
            for first, end in itertools.pairwise(places):
                logits[row, first:end] = model(input_ids=ids[row : row + 1, first:end]).logits[0]
    predicted = logits.argmax(-1)
    labels = predicted.clone()
    labels[:, ::2] = (labels[:, ::2] + 1) % 96
    labels[2, 3:] = labels[5] = -100
    labels[1, 0] = predicted[1, 0]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    correct = int((labels == predicted).sum())
    return {"input_ids": ids, "labels": labels} | more, float(loss), correct, predicted


PROMPTS = ([3, 1, 4], [1, 5, 9, 2, 6], [5, 3])


class Written:
    """A tokenizer whose texts are numbers."""

    def decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return " ".join(map(str, ids))


def row_of(whole):
    return {name: value[:1] for name, value in whole.items()}


@functools.cache
def greedy(end):
    """What a plain model goes on with, by its likeliest tokens, up to one that ends a text."""
    model, texts = plain_model(), {}
    for name, prompt in zip("abc", PROMPTS, strict=True):
        ids = torch.tensor([prompt])
        while ids.shape[1] < len(prompt) + 5 and (ids.shape[1] == len(prompt) or ids[0, -1] != end):
            with torch.no_grad():
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        texts[name] = " ".join(map(str, ids[0, len(prompt) :].tolist()))
    return texts


def end_of(in_documents):
    """An id that ends a text, where rows are one document; one that never comes, where they are several."""
    return -1 if in_documents else int(greedy(-1)["a"].split()[2])


def evaluated(world):
    """Loss and right predictions over data ranks, and what is predicted for the first microbatch, by layout."""
    return {name: _evaluated(case) for name, case in LAYOUTS.items() if case.world == world}


def _evaluated(case):
    whole = plain(case.documents)[0]
    session = session_of("llama", case, "fp64") if case.mode != "host" else offloaded(case)
    ranks, rank = degree(session.mesh, DATA_AXES), index(session.mesh, DATA_AXES)
    size = session.config.train.microbatch_size
    mine = {name: value.chunk(ranks)[rank].split(size) for name, value in whole.items()}
    microbatches = [dict(zip(mine, values, strict=True)) for values in zip(*mine.values(), strict=True)]
    found = session.evaluate(microbatches, total=1.0)
    numbers = torch.stack([found.loss, found.correct])
    all_reduce(numbers, group(session.mesh, DATA_AXES)).wait()
    first = {name: value[:size] for name, value in whole.items()}
    prompts = Prompts(tuple("abc"), PROMPTS, 5, frozenset({end_of(case.documents)}), Written(), row_of(whole))
    return numbers.tolist(), session.predict(first), prompts.continued(session)


def offloaded(case):
    config = run_config(replace(case, mode="1d"), "fp64")
    config = replace(config, memory=replace(config.memory, residency="host"))
    return apply(config, workload(config, model_config("llama")), device=torch.device("cpu"))


@pytest.mark.parametrize("world", sorted({case.world for case in LAYOUTS.values()}))
def test_it_is_that_of_a_plain_model_on_every_layout(world):
    for results in run_ranks(world, evaluated, world, timeout=240):
        for name, ((got_loss, got_correct), places, texts) in results.items():
            _, loss, correct, predicted = plain(LAYOUTS[name].documents)
            assert got_loss == pytest.approx(loss, rel=1e-6), name
            assert got_correct == correct, name
            assert torch.equal(places, predicted[: len(places)]), name
            assert texts == greedy(end_of(LAYOUTS[name].documents)), name


def test_half_of_the_targets_are_right():
    assert all(20 < plain(in_documents)[2] < 60 for in_documents in (False, True))
