"""Experts train, are planned and write in float64, in which torch has no grouped products, as in any dtype."""

from __future__ import annotations

import pytest
import torch
from layouts import Case, full, model_config, parameters_of, run_config, train_steps, twin
from transformers import AutoModelForCausalLM

from cai_apps import recipes
from cai_apps.applications.language.task import LANGUAGE, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.experts_form import let_experts_compute
from cai_apps.compose.models import meta_model
from cai_apps.compose.pretrained import open_pretrained
from cai_apps.planner.activations import saved_bytes
from cai_mesh.testing import assert_same_as_one_device, run_ranks

NAME, STEPS = "qwen3_moe", 3


def usual_config():
    """The config that a user has: nothing in it says in which form experts are computed."""
    config = model_config(NAME)
    config._experts_implementation = None
    return config


def trained_as_users_do(case):
    config, model = run_config(case, "fp64", STEPS), usual_config()
    session = apply(config, workload(config, model), device=torch.device("cpu"))
    losses, _ = train_steps(session, case, 0, STEPS)
    return losses, full(parameters_of(session)), model._experts_implementation


@pytest.mark.parametrize(
    "case",
    [Case(), Case(data=2, experts=2), pytest.param(Case(compile="on"), marks=pytest.mark.matrix)],
    ids=str,
)
def test_float64_trains_as_the_plain_loop(case):
    losses, parameters, form = run_ranks(case.world, trained_as_users_do, case, timeout=240)[0]
    expected, _, weights = twin(NAME, "fp64", STEPS)
    tolerance = 1e-5 if case.compile == "on" else 1e-9
    assert losses == pytest.approx(expected, rel=tolerance)
    if tolerance == 1e-9:
        assert_same_as_one_device(parameters, weights, tolerance=1e-7)
    assert form != "eager"  # another model may be made of this config, and in another dtype


def test_float64_is_planned_as_four_times_bfloat16():
    wide, narrow = (
        LANGUAGE.resolve(recipes.load("mixtral-tiny", {"precision.compute": dtype, "experts.z_loss": 0.0}), 4)
        for dtype in ("fp64", "bf16")
    )
    kept = [
        saved_bytes(config, LANGUAGE.workload(config), torch.device("cpu")).products
        for config in (wide, narrow)
    ]
    assert kept[0] == {name: 4 * size for name, size in kept[1].items()}


def test_an_export_in_float64_writes(tmp_path):
    AutoModelForCausalLM.from_config(usual_config()).double().save_pretrained(tmp_path)
    model = open_pretrained(tmp_path)
    assert model.dtype == torch.float64
    assert model(input_ids=torch.arange(5)[None]).logits.dtype == torch.float64


def test_other_dtypes_keep_their_form():
    model = meta_model(usual_config())
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        let_experts_compute(model, dtype)
        assert model.config._experts_implementation == "grouped_mm"
    let_experts_compute(model, torch.float64)
    layer = model.model.layers[0].mlp.experts
    assert layer.config._experts_implementation == model.config._experts_implementation == "eager"
