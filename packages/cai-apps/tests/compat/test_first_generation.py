"""Config files of the first generation: mapped, or refused with the line to write; engines train as a plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from booster_toys import llama, tokens
from torch import nn
from transformers import LlamaForCausalLM

import cai_apps.compat.colossalai as colossalai
from cai_apps.compat.colossalai.amp import AMP_TYPE
from cai_apps.compat.colossalai.context import ParallelMode
from cai_apps.compat.colossalai.core import global_context
from cai_apps.compat.colossalai.legacy.settings import plugin_of, read_settings
from cai_apps.compat.colossalai.zero.init_ctx import ZeroInitContext
from cai_apps.compat.colossalai.zero.shard_utils import TensorShardStrategy
from cai_mesh.errors import ConfigError
from cai_mesh.testing import run_ranks

ZERO = {
    "model_config": {"tensor_placement_policy": "cuda", "shard_strategy": TensorShardStrategy()},
    "optimizer_config": {"initial_scale": 2**5},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "2.5d": {"parallel": {"tensor": {"mode": "2.5d", "depth": 1, "size": 4}}},
    "pipeline": {"parallel": {"pipeline": 2, "tensor": {"mode": "1d", "size": 2}}, "NUM_MICRO_BATCHES": 4},
    "accumulated": {"gradient_accumulation": 2},
    "clipped": {"clip_grad_norm": 0.2},
    "zero": {"zero": ZERO},
    "fp16": {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 2**5}},
}
STEPS = 4


class NextToken(nn.Module):
    """The mean loss of next tokens, of logits."""

    def forward(self, output: Any, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(
            output.logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten()
        )


def rows(step: int, every: int) -> torch.Tensor:
    """Return the rows of a backward: those of a step, cut into as many as it has."""
    return tokens(step // every).chunk(every)[step % every]


def plain(clip: float | None) -> list[float]:
    """Return the losses of a plain loop."""
    model = llama()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2), []
    for step in range(STEPS):
        loss = NextToken()(model(input_ids=tokens(step)), tokens(step))
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def engines(directory: str) -> dict[str, list[float]]:
    """Return the losses of the engine under each config, on a rank."""
    return {name: trained(config, directory) for name, config in CONFIGS.items()}


def trained(config: dict[str, Any], directory: str) -> list[float]:
    """Return the losses of the engine under a config, on a rank; the model's values are those of a directory."""
    colossalai.launch_from_torch(config=config)
    every = config.get("gradient_accumulation", 1)
    with ZeroInitContext(target_device="cpu", shard_strategy=TensorShardStrategy(), shard_param=True):
        model = LlamaForCausalLM.from_pretrained(directory)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    ranks = global_context.get_world_size(ParallelMode.DATA)
    number = global_context.get_local_rank(ParallelMode.DATA)
    batches = [rows(step, every).chunk(ranks)[number] for step in range(STEPS * every)]
    loader = [({"input_ids": ids}, ids) for ids in batches]
    engine, loader, _, _ = colossalai.initialize(model, optimizer, NextToken(), loader)
    engine.train()
    losses, data = torch.zeros(STEPS), iter(loader)
    for step in range(STEPS * every):
        engine.zero_grad()
        _, _, loss = engine.execute_schedule(data)
        engine.step()
        losses[step // every] += loss.detach() / every
    torch.distributed.all_reduce(losses, group=global_context.get_group(ParallelMode.DATA))
    return (losses / ranks).tolist()


def test_engines_train_as_a_plain_loop(tmp_path):
    llama().save_pretrained(tmp_path)
    for name, losses in run_ranks(4, engines, str(tmp_path), timeout=300)[0].items():
        clip = CONFIGS[name].get("clip_grad_norm")
        tolerance = 2e-2 if name in ("zero", "fp16") else 2e-4
        assert losses == pytest.approx(plain(clip), abs=tolerance), name


def refused_on_a_rank() -> list[str]:
    """Return what configs are refused with, on a rank."""
    colossalai.launch_from_torch(config={})
    found = []
    for config in (
        {"parallel": {"tensor": {"mode": "2.4d", "size": 4}}},
        {"parallel": {"tensors": {"mode": "2d", "size": 4}}},
        {"parallel": {"tensor": {"mode": "1d", "size": 2, "dept": 1}}},
        {"zero": ZERO, "fp16": {"mode": AMP_TYPE.NAIVE}},
        {"zero": {"level": 3}},
        {"zero": {"model_config": {"tensor_placement_policy": "gpu"}}},
    ):
        with pytest.raises(ConfigError) as caught:
            plugin_of(read_settings(config))
        found.append(str(caught.value))
    return found


def test_what_is_not_read_is_refused_with_what_to_write():
    found = run_ranks(1, refused_on_a_rank)[0]
    expected = ["'2.5d'", "'tensor'", "'depth'", "initial_scale", "model_config", "'cpu'"]
    for text, words in zip(found, expected, strict=True):
        assert words in text


def test_a_file_is_read_and_a_key_that_is_nearly_one_is_refused(tmp_path):
    file = tmp_path / "config.py"
    file.write_text("BATCH_SIZE = 8\nparallel = dict(pipeline=1, tensor=dict(size=2, mode='1d'))\n")
    settings = read_settings(str(file))
    assert settings.BATCH_SIZE == 8 and settings.parallel.tensor.mode == "1d"
    with pytest.raises(ConfigError, match="did you mean 'parallel'"):
        read_settings({"paralel": {}})
    with pytest.raises(ConfigError, match="no such config file"):
        read_settings(str(tmp_path / "nowhere.py"))
