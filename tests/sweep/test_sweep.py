"""A dozen rows of the sweep of different structure, each in a column or two; the whole of it is `nox -s sweep`."""

from __future__ import annotations

import functools

import pytest

from sweep import page, table
from sweep.columns import COLUMNS
from sweep.configs import model_types, tiny

DOZEN = {
    "llama": ["zero3", "tp2", "tp2 sequence"],
    "gpt2": ["kernels", "offloaded", "pp2"],  # tied embeddings, Conv1D
    "mixtral": ["zero3", "experts 2", "context 2"],  # experts
    "llama4_text": ["experts 2"],  # experts that compute for all tokens
    "deepseek_v3": ["kernels"],  # latent attention, groups of experts
    "mamba": ["offloaded"],  # no attention
    "jamba": ["kernels", "zero3"],  # state spaces, attention and experts in turn
    "bart": ["one rank", "zero3", "pp2"],  # cross-attention that a decoder alone never uses
    "roc_bert": ["one rank"],  # changes what a linear layer returns in place
    "gemma3": ["offloaded", "zero3"],  # a model of parts, with initial values of their own
    "modernbert-decoder": ["one rank"],  # a module gives its children their values
    "gemma4_text": ["kernels"],  # layers of different shapes
}

reference = functools.cache(table.reference)


@pytest.mark.parametrize(("model_type", "column"), [(t, c) for t, cs in DOZEN.items() for c in cs])
def test_equals_the_plain_loop(model_type, column):
    found, entry = reference(model_type)
    assert found is not None, entry
    got = table.cell(column, model_type, found)
    assert got["outcome"] == "right", got


def test_the_dozen_covers_all_columns():
    assert {column for columns in DOZEN.values() for column in columns} == set(COLUMNS)


def test_values_that_nobody_gives_are_refused():
    found, _ = reference("openai-gpt")
    got = table.cell("one rank", "openai-gpt", found)
    assert got["outcome"] == "refused"
    assert "c_attn.weight has no initial value" in got["reason"]


def test_a_difference_beyond_rounding_is_seen():
    same = {"loss": 0.0, "norm": 0.0, "a": 0.0}
    assert table.too_much(same, same) == ""
    assert "a differs" in table.too_much(same | {"a": 0.3}, same)
    assert table.too_much(same | {"a": 0.3}, same | {"a": 0.1}) == ""
    assert "the loss" in table.too_much(same | {"loss": float("nan")}, same)


def test_a_tiny_config_has_every_kind_of_layer():
    config = tiny("qwen3_next")
    assert set(config.layer_types) == {"linear_attention", "full_attention"}
    assert len(config.layer_types) == config.num_hidden_layers


def test_the_page_says_what_the_results_say():
    assert page.PAGE.read_text() == page.text(table.results())


def test_the_results_are_of_known_types():
    assert set(table.results()) <= set(model_types())
