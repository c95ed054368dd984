"""Parameters that one token goes through, of classes of transformers with experts."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.experts import visited_share

COUNTS = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "n_group": 2,
    },
    "granitemoe": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "ernie4_5_moe": {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16},
    "llama": {},
}
SIZES = {
    "hidden_size": 32, "intermediate_size": 16, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.mark.parametrize("kind", list(COUNTS))
def test_of_experts_a_quarter_counts(kind):
    config = AutoConfig.for_model(kind, **SIZES, **COUNTS[kind])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shares = {name: visited_share(config, name, p) for name, p in model.named_parameters()}
    routed = {name for name, share in shares.items() if share != 1}
    assert {shares[name] for name in routed} <= {0.25}
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert bool(routed) == (kind != "llama")
    for name in routed:  # eight experts of three matrices of 32 x 16, two of them in one
        assert sizes[name] in (8 * 32 * 16, 8 * 2 * 32 * 16)


def test_a_config_that_says_nothing():
    assert visited_share(None, "experts.0.weight", torch.ones(2, 2)) == 1
