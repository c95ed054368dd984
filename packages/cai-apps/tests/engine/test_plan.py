"""A plan of text says what an engine takes: weights, keys and values, and the requests that there is room for."""

from __future__ import annotations

import json

import pytest
import torch
from engine_toys import small_model

from cai_apps.cli import main
from cai_apps.engine import LLM, EngineOptions
from cai_apps.engine.plan import CONTEXT, plan_inference
from cai_apps.engine.room import GIB, SHARE, cached_layers
from cai_mesh.errors import ConfigError

MEMORY = 2 * GIB


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "mixtral", "gpt_oss", "gpt2", "deepseek_v3"])
def test_a_plan_is_what_an_engine_takes(kind, dtype, tmp_path):
    model = small_model(kind, max_position_embeddings=4096).to(dtype)
    model.config.dtype = dtype
    model.config.save_pretrained(tmp_path)
    sizes = EngineOptions(block_size=4, batch_tokens=64, requests=100_000)
    plan = plan_inference(str(tmp_path), MEMORY, options=sizes)
    assert plan.weights == sum(weight.numel() * weight.element_size() for weight in model.parameters())
    assert plan.token == sum(layer.bytes for layer in cached_layers(model).values())
    room = int((MEMORY - CONTEXT - plan.weights) * SHARE)
    assert plan.room == room
    sizes = EngineOptions(block_size=4, batch_tokens=64, requests=100_000, memory=room / GIB)
    engine = LLM(model, options=sizes).engine
    longest = model.config.max_position_embeddings
    assert plan.requests[longest] == engine.pool.count // engine.limits.blocks_of(longest)


def test_windows_make_room(tmp_path):
    counts = []
    for window in (1024, 65536):
        layers = ["full_attention" if number % 6 == 5 else "sliding_attention" for number in range(12)]
        options = {"num_hidden_layers": 12, "layer_types": layers, "max_position_embeddings": 65536}
        config = small_model("gemma3_text", sliding_window=window, **options).config
        config.save_pretrained(tmp_path / str(window))
        counts.append(plan_inference(str(tmp_path / str(window)), MEMORY).requests[32768])
    assert counts[0] > 3 * counts[1]  # all of two layers, and 1,024 tokens and a chunk of ten


def plan_of(capsys, *arguments):
    assert main(["plan", "--generate", *arguments]) == 0
    return capsys.readouterr().out


def test_the_command(capsys):
    text = plan_of(capsys, "llama-8b", "--gpu-memory", "80GiB")
    assert "weights   14.96 GiB in bfloat16" in text and "128 KiB of keys and values in 32 layers" in text
    facts = json.loads(plan_of(capsys, "llama-8b", "--gpu-memory=80GiB", "--json"))
    assert facts["requests"]["8192"] == int((80 - 1 - 14.958) * 0.9)  # GiB, one of which 8,192 tokens take
    assert "NOT fit 80.00 GiB; they fit on 2 tensor ranks" in plan_of(
        capsys, "llama-70b", "--gpu-memory", "80GiB"
    )
    assert "on each of 4 tensor ranks" in plan_of(capsys, "llama-70b", "--ranks", "4")
    with pytest.raises(ConfigError, match="heads of llama-8b cannot be cut over 3"):
        plan_inference("llama-8b", None, ranks=3)
    assert main(["plan", "--generate", "llama-8b", "llama-tiny"]) == 2
    assert "--generate takes a model and no run" in capsys.readouterr().err
