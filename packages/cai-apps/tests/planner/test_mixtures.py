"""Recipes of mixtures of experts: shapes are those on the hub, and plans fit the GPUs that a recipe names."""

from __future__ import annotations

import json

import pytest

from cai_apps.cli import main
from cai_apps.compose.models import load_model_config, meta_model, read_model_config
from cai_tensor_parallel import find_experts


@pytest.mark.parametrize(
    ("recipe", "memory", "parameters", "learned"),
    [
        ("qwen3-30b-a3b", "141GB", 30_532_122_624, 30_532_122_624),
        ("mixtral-8x7b", "80GB", 46_702_792_704, 46_702_792_704),
        ("lora-30b-a3b", "80GB", 31_174_637_568, 642_514_944),
        pytest.param("deepseek-v3", "80GB", 671_123_410_944, 97_006_592, marks=pytest.mark.matrix),
    ],
)
def test_recipes_of_mixtures_fit_their_gpus(recipe, memory, parameters, learned, capsys):
    """Parameters are those of the models on the hub (30.5, 46.7 and 671 billion), and adapters beside them."""
    assert main(["plan", recipe, "--gpu-memory", memory, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["fits"] is True
    assert facts["parameters"] == parameters
    assert facts["parameters"] - facts["frozen"] == learned


@pytest.mark.parametrize(
    ("recipe", "elements"),
    [("qwen3-30b-a3b", 30_532_122_624), ("mixtral-8x7b", 46_702_792_704), ("deepseek-v3", 671_026_404_352)],
)
def test_shapes_of_mixtures_have_a_field_of_transformers_for_each_size(recipe, elements):
    """A size under a name that transformers does not know would be left at its default, in silence."""
    table, config = read_model_config(recipe), load_model_config(recipe)
    rope = {"rope_theta": table.pop("rope_theta"), **table.pop("rope_scaling", {"rope_type": "default"})}
    assert config.rope_parameters == rope
    unknown = {name for name in table if not hasattr(type(config)(), name)}
    assert unknown <= {"head_dim"}  # Qwen3-MoE has it where it is given, and its attention reads it
    assert {name: getattr(config, name) for name in table} == table
    model = meta_model(config)
    assert sum(param.numel() for param in model.parameters()) == elements
    assert find_experts(model)
