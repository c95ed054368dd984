"""Models without memory: every plugin gives them the same first values, and goes on as a plain loop from these."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from booster_toys import GEMINI, PLUGINS, WORDS, Loop, hybrid, llama, mixtral, plain_losses
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from cai_apps.booster import (
    Booster,
    GeminiPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    TorchDDPPlugin,
    launch,
)
from cai_apps.compat.colossalai.lazy import LazyInitContext
from cai_mesh.errors import CaiError
from cai_mesh.testing import run_ranks

CORE = ("zero1", "fsdp", "zero2 on the host", "pipeline 2 tensor 2", "gemini state on the host")
REST = ("ddp", "pipeline 2 zero3", "pipeline 2 in a v", "rows by heads", "rows in a ring")
IN_BF16 = {
    f"gemini {name}": functools.partial(GeminiPlugin, **{"precision": "bf16"} | options)
    for name, options in GEMINI.items()
    if "max_norm" not in options
}


@contextlib.contextmanager
def caught(name: str):
    """Yield the lines of a log meanwhile."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger(name).addHandler(handler)
    try:
        yield lines
    finally:
        logging.getLogger(name).removeHandler(handler)


def tied() -> nn.Module:
    """Return a model without memory, whose head is its embedding."""
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": WORDS}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**shape, **heads, tie_word_embeddings=True, pad_token_id=3)
    with LazyInitContext():
        return LlamaForCausalLM(config)


def of_files(directory: str) -> nn.Module:
    """Return a model of a directory, whose values boost will read."""
    with LazyInitContext(default_device="cpu"):
        model = AutoModelForCausalLM.from_pretrained(directory)
    assert all(param.is_meta for param in model.parameters())
    return model


def boosted(names: tuple[str, ...], directory: str, files: str | None) -> dict[str, list[float]]:
    """Return the losses under some plugins on a rank, whose first values it writes into a directory each."""
    launch()
    torch.manual_seed(100 + dist.get_rank())  # the first rank's counts
    losses = {}
    for name in names:
        loop = Loop(
            (PLUGINS | IN_BF16)[name](), tied if files is None else functools.partial(of_files, files)
        )
        if files is None:
            loop.booster.save_model(loop.model, Path(directory) / name, shard=True)
        losses[name] = loop.losses()
    return losses


def follows(name: str, losses: list[float], expected: list[float]) -> None:
    """Assert that losses under a plugin are those of a plain loop."""
    assert losses == pytest.approx(expected, abs=2e-2 if name in IN_BF16 else 2e-4), name


@pytest.mark.parametrize(
    "names", [CORE, pytest.param((*CORE[:1], *REST, *IN_BF16), marks=pytest.mark.matrix)]
)
def test_values_are_the_same_and_the_loop_is_a_plain_one(names, tmp_path):
    losses = run_ranks(4, boosted, names, str(tmp_path), None, timeout=400)[0]
    models = {name: LlamaForCausalLM.from_pretrained(tmp_path / name) for name in names}
    first = models[names[0]].state_dict()
    for model in models.values():
        for name, value in model.state_dict().items():
            assert torch.equal(value, first[name].to(value.dtype)), name
    assert first["model.embed_tokens.weight"].std() == pytest.approx(0.02, rel=0.1)
    assert first["model.embed_tokens.weight"][3].eq(0).all()
    assert first["model.norm.weight"].eq(1).all()
    expected = plain_losses(lambda: models[names[0]])
    for name in names:
        follows(name, losses[name], expected)


@pytest.mark.parametrize(
    "names", [CORE[1:2], pytest.param((*CORE, *REST, *IN_BF16), marks=pytest.mark.matrix)]
)
def test_values_of_files_are_read_by_boost(names, tmp_path):
    llama().save_pretrained(tmp_path)
    losses = run_ranks(4, boosted, names, "", str(tmp_path), timeout=400)[0]
    expected = plain_losses()
    for name in names:
        follows(name, losses[name], expected)


def experts(directory: str) -> list[float]:
    """Return the losses of experts over ranks, whose published files boost and `load_model` read, on a rank."""
    launch()
    plugin = MoeHybridParallelPlugin(tp_size=1, pp_size=1, ep_size=2, precision="fp32", zero_stage=2)
    loop = Loop(plugin, functools.partial(of_files, directory))
    loop.booster.save_model(loop.model, Path(directory) / "again", shard=True)
    with torch.no_grad():
        for param in loop.model.module.parameters():
            param.zero_()
    loop.booster.load_model(loop.model, Path(directory) / "again")
    return loop.losses(0, 4)


def test_published_files_of_experts_are_read(tmp_path):
    mixtral().save_pretrained(tmp_path)
    assert any("experts.0.w1" in name for name in safetensors.torch.load_file(tmp_path / "model.safetensors"))
    losses = run_ranks(2, experts, str(tmp_path), timeout=200)[0]
    assert losses == pytest.approx(plain_losses(mixtral, steps=4), abs=2e-4)


def headed(directory: str) -> tuple[list[str], bool]:
    """Return what is logged of a head that files lack, and whether the rest is theirs, on a rank."""
    launch()
    if dist.get_rank() == 0:
        llama().save_pretrained(directory)
    dist.barrier()
    with LazyInitContext():
        model = LlamaForSequenceClassification.from_pretrained(directory, num_labels=3, pad_token_id=0)
    several = dist.get_world_size() > 1
    plugin = hybrid(pp_size=2, num_microbatches=2)() if several else TorchDDPPlugin()
    with caught("cai_apps.booster") as lines:
        boosted = Booster(plugin=plugin).boost(model)[0]
    whole = dict(llama().named_parameters())
    held = dict(boosted.module.named_parameters())
    same = all(torch.equal(param, whole[name]) for name, param in held.items() if name != "score.weight")
    return lines, same and ("score.weight" not in held or held["score.weight"].std() > 0.01)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_head_that_files_lack_is_new_and_named(ranks, tmp_path):
    results = run_ranks(ranks, headed, str(tmp_path), timeout=100)
    assert all(same for _, same in results)
    lines = [line for printed, _ in results for line in printed]
    assert len(lines) == 1 and lines[0].endswith("lacks score.weight: new values were drawn for them")


class Scaled(nn.Module):
    """A layer whose constructor alone gives a weight its value."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.full((4,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.scale


def refused() -> list[str]:
    """Return what is said of models that nobody can fill, on a rank."""
    launch()
    booster = Booster(plugin=LowLevelZeroPlugin(stage=1, precision="bf16"))
    with torch.device("meta"):
        layer, partly = Scaled(), Scaled()
    partly.scale = nn.Parameter(torch.ones(4))
    words = []
    for model in (layer, partly):
        with pytest.raises(CaiError) as raised:
            booster.boost(model, torch.optim.AdamW(model.parameters()))
        words.append(str(raised.value))
    with tempfile.TemporaryDirectory() as directory, LazyInitContext():
        LlamaConfig().save_pretrained(directory)
        with pytest.raises(CaiError) as raised:
            LlamaForCausalLM.from_pretrained(directory, device_map="auto")
    return [*words, str(raised.value)]


def test_what_nobody_can_fill_is_refused():
    without, partly, options = run_ranks(1, refused, timeout=100)[0]
    assert "scale has no initial value" in without
    assert "scale is not" in partly
    assert "device_map" in options and "outside the context" in options
