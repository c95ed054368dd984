from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from cai_apps.applications.language.config import Config, LoRA
from cai_apps.applications.language.model import build
from cai_apps.compose.models import load_model_config, meta_model
from cai_apps.data.document_rows import lengths_of
from cai_apps.planner.flops import model_flops

ROW = np.array([100])
MIXED = ["sliding_attention", "full_attention"]


def test_llama_by_hand():
    """512 x 128 head, 4 layers of q 128x128, k and v 128x64, o 128x128 and three 128x352."""
    config = load_model_config("llama-tiny")
    flops = model_flops(meta_model(config), config)
    weights = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352)
    assert flops.full(ROW) == 100 * (6 * weights + 12 * 4 * 128 * 100)
    assert flops.causal(ROW) == 100 * (6 * weights + 6 * 4 * 128 * 100)


def test_tied_embedding_counts_once_as_the_head():
    config = load_model_config("gpt2-tiny")
    flops = model_flops(meta_model(config), config)
    weights = 512 * 128 + 4 * (4 * 128 * 128 + 8 * 128 * 128)
    assert flops.full(ROW) == 100 * (6 * weights + 12 * 4 * 128 * 100)


def test_of_experts_those_count_that_a_token_visits():
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(
        "mixtral", **sizes, num_attention_heads=2, num_key_value_heads=2, num_local_experts=8
    )
    flops = model_flops(meta_model(config), config)
    layer = 4 * 32 * 32 + 8 * 32 + 2 * 3 * 32 * 48  # attention, router, two of eight experts
    assert flops.full(ROW) == 100 * (6 * (64 * 32 + 2 * layer) + 12 * 2 * 32 * 100)


def test_a_model_without_heads_counts_its_weights():
    from transformers import AutoConfig

    config = AutoConfig.for_model("mamba", hidden_size=32, num_hidden_layers=2, vocab_size=64)
    flops = model_flops(meta_model(config), config)
    assert flops.full(ROW) == flops.causal(ROW) > 100 * 6 * 64 * 32


def test_8b_is_about_six_times_its_parameters():
    config = load_model_config("llama-8b")
    flops = model_flops(meta_model(config), config)
    row = np.array([4096])
    assert flops.causal(row) == pytest.approx(4096 * (6 * 7.5e9 + 6 * 32 * 4096 * 4096), rel=0.01)


def adapted(**options):
    """A llama-tiny with adapters, and its config."""
    model = load_model_config("llama-tiny")
    config = replace(Config(), lora=LoRA(rank=4, **options))
    with torch.device("meta"):
        return build(config, model), model


def test_adapters_beside_frozen_weights_cost_four_and_six():
    """The first block's products with frozen weights too, though what comes into it needs no gradient."""
    flops = model_flops(*adapted())
    frozen = 512 * 128 + 4 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352)
    trained = 4 * 4 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352))
    assert flops.weights == 4 * frozen + 6 * trained


def counted(model, ids):
    """FLOPs that torch counts of forward and backward, of products with weights alone."""
    model = model.to_empty(device="cpu").float()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids).logits.float().sum().backward()
    of_all = counter.get_flop_counts()["Global"]
    return sum(count for operator, count in of_all.items() if "attention" not in str(operator))


@pytest.mark.parametrize(
    "targets",
    [(), tuple(f"model.layers.{i}.mlp.down_proj" for i in (2, 3)), ("model.layers.3.self_attn.q_proj",)],
)
def test_torch_counts_the_same_of_a_step_with_adapters(targets):
    """But for the first block with adapters, whose products in front of the first adapter have no backward."""
    pytest.importorskip("peft")
    model, config = adapted(targets=targets)
    flops = model_flops(model, config)
    ids = torch.zeros(1, 64, dtype=torch.int64)
    first_block = 64 * 2 * (2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 4 * 3000)
    assert 0 <= flops.weights * 64 - counted(model, ids) <= first_block


def test_documents_count_their_triangles():
    """Those of each document of a row, what fills it among them."""
    config = load_model_config("llama-tiny")
    flops = model_flops(meta_model(config), config)
    bounds = torch.tensor([[0, 60, 90, 100, 100], [0, 100, 100, 100, 100]], dtype=torch.int32)
    lengths = lengths_of({"input_ids": torch.zeros(2, 100), "cu_seqlens": bounds})
    assert sorted(lengths[lengths > 0]) == [10, 30, 60, 100]
    pairs = (60**2 + 30**2 + 10**2 + 100**2) / 2
    assert flops.causal(lengths) == 200 * flops.weights + 12 * 4 * 128 * pairs
    assert flops.full(lengths) == 200 * flops.weights + 12 * 4 * 128 * pairs * 2
    whole_rows = flops.causal(lengths_of({"input_ids": torch.zeros(2, 100)}))
    assert whole_rows == 200 * flops.weights + 12 * 4 * 128 * 100**2


@pytest.mark.parametrize(
    ("kind", "options", "windows"),
    [
        ("mistral", {"sliding_window": 16}, {16: 2}),
        ("mistral", {"sliding_window": None}, {None: 2}),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 16}, {None: 2}),
        ("gemma3_text", {"sliding_window": 16, "layer_types": MIXED}, {16: 1, None: 1}),
        ("qwen3_next", {"layer_types": ["linear_attention", "full_attention"]}, {None: 1}),
    ],
)
def test_windows_count_what_a_token_sees(kind, options, windows):
    from transformers import AutoConfig

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = AutoConfig.for_model(
        kind, **sizes, num_attention_heads=2, num_key_value_heads=2, head_dim=16, **options
    )
    flops = model_flops(meta_model(config), config)
    assert flops.windows == windows
    seen = sum(
        layers * sum(min(place + 0.5, window or 100) for place in range(100))
        for window, layers in windows.items()
    )
    assert flops.causal(ROW) == pytest.approx(100 * flops.weights + 12 * 32 * seen, rel=0.01)
