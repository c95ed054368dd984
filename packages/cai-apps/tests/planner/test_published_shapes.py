"""Recipes of published shapes: their sizes are those of the papers, plans fit the GPUs they name, small ones learn."""

from __future__ import annotations

import json

import pytest

from cai_apps.applications.classification.model import kind_of, on_meta
from cai_apps.cli import main
from cai_apps.compose.models import load_model_config, meta_model, read_model_config

PUBLISHED = {
    "gpt3-175b": 175.0,  # Brown et al., arXiv:2005.14165, table 2.1
    "palm-62b": 62.5,  # Chowdhery et al., arXiv:2204.02311, table 1
    "opt-30b": 30.0,  # Zhang et al., arXiv:2205.01068, table 1
}
"""Billions of parameters, as their papers say."""


@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_shape_has_the_parameters_of_its_paper(recipe):
    """And every size in its file is one that transformers reads; another name would be left at its default."""
    table, config = read_model_config(recipe), load_model_config(recipe)
    assert {name: getattr(config, name) for name in table} == table
    counted = sum(parameter.numel() for parameter in meta_model(config).parameters())
    assert counted / 1e9 == pytest.approx(PUBLISHED[recipe], rel=0.004)


@pytest.mark.parametrize(("name", "millions"), [("bert-base", 109.48), ("vit-base", 85.80)])
def test_models_that_classify_two_classes_have_the_published_sizes(name, millions):
    """Devlin et al., arXiv:1810.04805, section 3; Dosovitskiy et al., arXiv:2010.11929, table 1, with small heads."""
    config = load_model_config(name)
    model = on_meta(config, kind_of(config, name))
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.01
    )


def test_palms_layers_are_parallel():
    """Attention and the feed-forward layer read one normalized input, and one key/value head serves all."""
    model = meta_model(load_model_config("palm-tiny"))
    layer = model.model.layers[0]
    assert [name for name, _ in layer.named_children()] == ["self_attn", "mlp", "input_layernorm"]
    assert layer.self_attn.k_proj.out_features == layer.self_attn.head_dim
    assert not [name for name, _ in model.named_parameters() if name.endswith("bias")]
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", PUBLISHED)
def test_a_plan_fits_the_gpus_that_the_recipe_names(recipe, capsys):
    assert main(["plan", recipe, "--gpu-memory", "80GiB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True


@pytest.mark.matrix
@pytest.mark.parametrize("recipe", ["opt-tiny", "palm-tiny"])
def test_the_small_ones_learn(recipe, tmp_path):
    changes = ("--train.steps", "30", "--train.validate_every", "0", "--log.directory", str(tmp_path))
    assert main(["train", recipe, *changes]) == 0
    losses = [json.loads(line)["loss"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(losses) == 30 and losses[-1] < losses[0] - 0.5
