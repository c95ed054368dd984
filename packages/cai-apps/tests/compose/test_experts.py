"""Training with spread experts equals the plain loop under every layout; checkpoints, files and plans go along."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from layouts import (
    SPREAD,
    Case,
    full,
    model_config,
    parameters_of,
    run_config,
    session_of,
    train_steps,
    trained,
    twin,
)

from cai_apps.applications.language.task import export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.data.tokenizer import train_tokenizer
from cai_mesh import checkpoint
from cai_mesh.errors import CaiError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

STEPS, HALF = 4, 2
TOLERANCE = {"qwen3_moe": 1e-9, "deepseek_v3": 1e-5}
"""DeepSeek-V3 chooses experts in float32."""

expected = functools.cache(twin)


IN_THE_SUITE = (
    "data2-experts2-zero3",
    "data2-tensor2-experts4",
    "data2-pipeline2-zb-v-experts2-zero3",
    "data2-experts2-recompute",
    "data2-experts2-compiled",
)
"""The matrix runs all layouts."""


def trained_each(case):
    return [trained(model, case, "fp64", STEPS) for model in TOLERANCE]


@pytest.mark.parametrize(
    "layout",
    [name if name in IN_THE_SUITE else pytest.param(name, marks=pytest.mark.matrix) for name in SPREAD],
)
def test_equals_the_plain_loop(layout):
    results = run_ranks(SPREAD[layout].world, trained_each, SPREAD[layout], timeout=240)
    for place, model in enumerate(TOLERANCE):
        got_losses, got_gradients, got_parameters = results[0][place]
        for other in results[1:]:
            assert other[place] == got_losses
        losses, gradients, parameters = expected(model, "fp64", STEPS)
        tolerance = TOLERANCE[model]
        if "on" in (SPREAD[layout].kernels, SPREAD[layout].compile):
            tolerance = (
                1e-5  # the model's own norms multiply in float32, kernels and the compiler in another order
            )
        assert got_losses == pytest.approx(losses, rel=tolerance)
        assert_same_as_one_device(got_gradients, gradients, tolerance=max(tolerance, 1e-8))
        if tolerance < 1e-8:
            assert_same_as_one_device(got_parameters, parameters, tolerance=1e-7)


PLACES = {
    "one": Case(),
    "experts2": Case(data=2, experts=2),
    "experts4-zero3": Case(data=4, experts=4, zero=3, microbatches=2),
    "pipeline2": Case(data=2, pipeline=2, experts=2),
    "tensor2": Case(tensor=2),
}


def first_half(case, directory):
    session = session_of("qwen3_moe", case, "fp64", STEPS)
    train_steps(session, case, 0, HALF)
    checkpoint.save(directory, session.state(), step=HALF)
    return full(tensors_of(session.state()))


def tensors_of(state):
    return {name: value for name, value in state.items() if name != "optimizer.param_groups"}


def second_half(case, directory):
    session = session_of("qwen3_moe", case, "fp64", STEPS)
    for param in session.model.parameters():
        param.data.zero_()  # whatever is not loaded shows
    session.loaded(checkpoint.load(directory, session.state()), HALF)
    loaded = {name: value.clone() for name, value in full(tensors_of(session.state())).items()}
    losses, _ = train_steps(session, case, HALF, STEPS)
    return loaded, losses


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        ("one", "experts2"),
        ("experts2", "experts4-zero3"),
        ("experts4-zero3", "pipeline2"),
        ("experts2", "tensor2"),
    ],
)
def test_checkpoints_move_between_layouts(saved, loaded, tmp_path):
    kept = run_ranks(PLACES[saved].world, first_half, PLACES[saved], str(tmp_path), timeout=240)[0]
    again, losses = run_ranks(PLACES[loaded].world, second_half, PLACES[loaded], str(tmp_path), timeout=240)[
        0
    ]
    assert again.keys() == kept.keys()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert losses == pytest.approx(expected("qwen3_moe", "fp64", STEPS)[0][HALF:], rel=1e-9)


def export(model, case, directory, tokenizer):
    session = session_of(model, case, "fp32", 2)
    train_steps(session, case, 0, 2)
    export_hf(session, directory, tokenizer)
    parameters = full(parameters_of(session))
    return parameters if dist.get_rank() == 0 else None


def read(model, case, directory):
    from dataclasses import replace

    config = run_config(case, "fp32", 2)
    config = replace(config, model=replace(config.model, name=str(directory), weights="pretrained"))
    session = apply(config, workload(config, model_config(model)), device=torch.device("cpu"))
    return full(parameters_of(session))


@pytest.mark.parametrize("model", list(TOLERANCE))
def test_folders_of_transformers_are_written_and_read(model, tmp_path):
    from transformers import AutoModelForCausalLM

    train_tokenizer(["some text"], 300).save_pretrained(tmp_path / "tokenizer")
    case = PLACES["experts2"]
    weights = run_ranks(2, export, model, case, tmp_path / "hf", tmp_path / "tokenizer", timeout=240)[0]
    opened = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").named_parameters())
    assert opened.keys() == weights.keys()
    assert all(torch.equal(opened[name], weights[name]) for name in opened)
    for name in ("experts4-zero3", "pipeline2"):
        got = run_ranks(PLACES[name].world, read, model, PLACES[name], tmp_path / "hf", timeout=240)[0]
        assert all(torch.equal(got[n], weights[n]) for n in weights)


def refused(name, case):
    with pytest.raises(CaiError) as error:
        session_of(name, case, "fp32")
    return str(error.value)


def test_experts_that_cannot_be_spread_are_refused():
    assert "has no layers of experts" in run_ranks(2, refused, "llama", Case(data=2, experts=2))[0]
    assert "4 experts over 8 ranks" in run_ranks(8, refused, "qwen3_moe", Case(data=8, experts=8))[0]
    assert "do not divide the ranks" in run_ranks(2, refused, "qwen3_moe", Case(data=2, experts=4))[0]
