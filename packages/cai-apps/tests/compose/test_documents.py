"""A row of documents trains as each of them alone in a plain loop, under every layout and for every kind of model."""

from __future__ import annotations

import functools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from layouts import DOCUMENTED, Case, documents, model_config, trained, twin
from transformers import masking_utils

from cai_apps.compose.documents import check_keeps_documents_apart, document_rule
from cai_apps.compose.models import causal_model, meta_model
from cai_mesh.attention import route_attention
from cai_mesh.errors import ConfigError
from cai_mesh.testing import assert_same_as_one_device, run_ranks

STEPS = 3
LAYOUTS = {
    "one": Case(),
    "data2-zero1": Case(data=2),
    "data2-zero3": Case(data=2, zero=3),
    "tensor2-sequence": Case(tensor=2, sequence=True),
    "pipeline2-1f1b": Case(pipeline=2),
    "pipeline2-zb-v": Case(pipeline=2, chunks=2, schedule="zb-v", unshard="step"),
    "one-recompute": Case(recompute="full"),
    "one-most": Case(recompute="most"),
    "one-compiled": Case(compile="on", recompute="selective"),
    "data2-zero3-kernels": Case(data=2, zero=3, kernels="on"),
    "tensor4-2d": Case(tensor=4, mode="2d"),
    "2x2x2-zero1": Case(data=2, tensor=2, pipeline=2),
}
MODELS = ("llama", "gpt2", *DOCUMENTED)
CORE = [
    *(("llama", layout) for layout in LAYOUTS),
    *((model, "data2-zero3") for model in MODELS[1:]),
    *((model, "pipeline2-1f1b") for model in MODELS[1:]),
    ("qwen3", "tensor2-sequence"),
    ("gemma3_text", "tensor2-sequence"),
    ("phi3", "one-compiled"),
    ("gpt2", "2x2x2-zero1"),
    ("mistral", "one-most"),
]
expected = functools.cache(functools.partial(twin, dtype="fp64", steps=STEPS, one_by_one=True))


def layout_pairs():
    rest = [(model, layout) for model in MODELS for layout in LAYOUTS if (model, layout) not in CORE]
    return [*CORE, *(pytest.param(*pair, marks=pytest.mark.matrix) for pair in rest)]


@pytest.mark.parametrize(("model", "layout"), layout_pairs())
def test_rows_equal_their_documents_one_by_one(model, layout):
    losses, gradients, _ = expected(model)
    case = replace(LAYOUTS[layout], documents=True)
    got_losses, got_gradients, _ = run_ranks(case.world, trained, model, case, "fp64", STEPS, timeout=240)[0]
    other = (
        case.kernels == "on" or case.compile == "on" or case.mode != "1d" or model in ("gemma3_text", "olmoe")
    )  # parts in float32
    exact = 1e-6 if other else 1e-8
    assert got_losses == pytest.approx(losses, rel=exact)
    assert_same_as_one_device(got_gradients, gradients, tolerance=exact)


@pytest.mark.parametrize("name", ["mamba", "jamba", "bloom", "stablelm", "llama4_text"])
def test_a_model_that_mixes_documents_or_cannot_be_tried_is_refused_by_name(name):
    from transformers import AutoConfig

    with pytest.raises(ConfigError, match=rf"{name}(.|\n)*boundaries"):
        check_keeps_documents_apart(meta_model(AutoConfig.for_model(name)), name)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3", "gemma2", "gemma3_text", "mistral", "phi3", "olmoe", "opt", "gpt_oss"]
)
def test_models_that_keep_documents_apart(name):
    from transformers import AutoConfig

    check_keeps_documents_apart(meta_model(AutoConfig.for_model(name)), name)


def test_no_wait_for_positions():
    """transformers looks for restarting positions in every forward, and the host waits: not with boundaries given."""
    routed, plain = (causal_model(model_config("llama")) for _ in range(2))
    route_attention(routed, document_rule)
    boundaries, ids = documents(0)[1], torch.zeros(8, 12, dtype=torch.int64)
    with mock.patch.object(
        masking_utils, "find_packed_sequence_indices", side_effect=AssertionError("a look")
    ):
        routed(input_ids=ids, use_cache=False, **boundaries)
        with pytest.raises(AssertionError, match="a look"):
            plain(input_ids=ids, use_cache=False, position_ids=boundaries["position_ids"])
