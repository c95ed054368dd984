from __future__ import annotations

import pytest

from cai_apps.flops import token_flops
from cai_apps.models import load_model_config, meta_model


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


def test_8b_is_about_six_times_its_parameters():
    config = load_model_config("llama-8b")
    flops = token_flops(meta_model(config), config, 4096)
    assert flops.causal == pytest.approx(6 * 7.5e9 + 6 * 32 * 4096 * 4096, rel=0.01)
