from __future__ import annotations

import pytest

from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.planner.flops import token_flops


def test_llama_by_hand():
    """512 x 128 head, 4 layers of q 128x128, k and v 128x64, o 128x128 and three 128x352."""
    config = load_model_config("llama-tiny")
    flops = token_flops(meta_model(config), config, 100)
    weights = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352)
    assert flops.full == 6 * weights + 12 * 4 * 128 * 100
    assert flops.causal == 6 * weights + 6 * 4 * 128 * 100


def test_tied_embedding_counts_once_as_the_head():
    config = load_model_config("gpt2-tiny")
    flops = token_flops(meta_model(config), config, 100)
    weights = 512 * 128 + 4 * (4 * 128 * 128 + 8 * 128 * 128)
    assert flops.full == 6 * weights + 12 * 4 * 128 * 100


def test_of_experts_those_count_that_a_token_visits():
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(
        "mixtral", **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=8
    )
    flops = token_flops(meta_model(config), config, 10)
    layer = 4 * 32 * 32 + 8 * 32 + 2 * 3 * 32 * 48  # attention, router, two of eight experts
    assert flops.full == 6 * (64 * 32 + 2 * layer) + 12 * 2 * 32 * 10


def test_a_model_without_heads_counts_its_weights():
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64)
    flops = token_flops(meta_model(config), config, 10)
    assert flops.full == flops.causal > 6 * 64 * 32


def test_8b_is_about_six_times_its_parameters():
    config = load_model_config("llama-8b")
    flops = token_flops(meta_model(config), config, 4096)
    assert flops.causal == pytest.approx(6 * 7.5e9 + 6 * 32 * 4096 * 4096, rel=0.01)
