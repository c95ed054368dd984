"""Files that cut a model otherwise than transformers does, as those of mixtures of experts: read and written."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import Case, full, model_config, parameters_of, run_config
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from cai_apps.applications.language.task import export_hf, workload
from cai_apps.compose.apply import apply
from cai_apps.compose.conversions import saved_tensors
from cai_apps.compose.models import meta_model
from cai_apps.compose.published_names import present_tensors
from cai_apps.data.tokenizer import train_tokenizer
from cai_mesh.checkpoint import load_hf, save_hf
from cai_mesh.errors import CheckpointError
from cai_mesh.testing import run_ranks

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24, "num_hidden_layers": 2, "vocab_size": 64,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DEEPSEEK = {**LATENT, "num_key_value_heads": 4, "n_routed_experts": 12, "n_shared_experts": 1,
            "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
MLP = "model.layers.1.mlp"
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "mixtral": (
        {"num_local_experts": 12},
        [
            f"model.layers.1.block_sparse_moe.{name}.weight"
            for name in ("gate", "experts.0.w1", "experts.11.w2", "experts.2.w3")
        ],
    ),
    "qwen2_moe": (
        {"num_experts": 12, "shared_expert_intermediate_size": 16},
        [
            f"{MLP}.{name}.weight"
            for name in (
                "gate", "experts.11.gate_proj", "experts.2.up_proj", "shared_expert.down_proj", "shared_expert_gate",
            )
        ],
    ),
    "qwen3_moe": ({"num_experts": 12, "head_dim": 8}, [f"{MLP}.experts.11.down_proj.weight"]),
    "olmoe": ({"num_experts": 12}, [f"{MLP}.experts.11.gate_proj.weight"]),
    "deepseek_v2": (DEEPSEEK, [f"{MLP}.experts.11.up_proj.weight", f"{MLP}.shared_experts.up_proj.weight"]),
    "deepseek_v3": (DEEPSEEK, [f"{MLP}.experts.11.up_proj.weight", f"{MLP}.gate.e_score_correction_bias"]),
    "phimoe": ({"num_local_experts": 12}, ["model.layers.1.block_sparse_moe.experts.11.w2.weight"]),
    "minimax_m2": ({"num_local_experts": 12, "head_dim": 8}, ["model.layers.1.block_sparse_moe.experts.11.w2.weight"]),
    "jamba": (
        {"num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2,
         "expert_layer_offset": 1, "mamba_d_state": 4, "use_mamba_kernels": False},
        ["model.layers.1.feed_forward.experts.3.gate_proj.weight", "model.layers.1.feed_forward.router.weight"],
    ),
}  # fmt: skip
"""Sizes of a config, and names that the family's published files have: those of mistralai/Mixtral-8x7B-v0.1,
Qwen/Qwen1.5-MoE-A2.7B, Qwen/Qwen3-30B-A3B, allenai/OLMoE-1B-7B-0924, deepseek-ai/DeepSeek-V2-Lite and DeepSeek-V3,
microsoft/Phi-3.5-MoE-instruct, MiniMaxAI/MiniMax-M2 and ai21labs/Jamba-v0.1."""


def config_of(family: str) -> Any:
    return AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family][0]})


def drawn(config: Any, seed: int = 0) -> nn.Module:
    """A model whose every parameter has values of its own."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    return model


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(3, 19)[None], use_cache=False).logits


def stored(directory: Path) -> dict[str, Tensor]:
    return {
        name: value for file in directory.glob("*.safetensors") for name, value in load_file(file).items()
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_files_of_the_hub_are_read_and_written(family, tmp_path):
    config = config_of(family)
    theirs = drawn(config)
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="60KB")
    names = stored(tmp_path / "hub").keys()
    assert set(FAMILIES[family][1]) <= names, "transformers does not write this family as the hub has it"

    ours = drawn(config, seed=1)
    meta = meta_model(config)
    assert not torch.equal(logits(ours), logits(theirs))
    load_hf(ours, tmp_path / "hub", tensors=partial(present_tensors, meta))
    assert torch.equal(logits(ours), logits(theirs))

    save_hf(ours, tmp_path / "export", tensors=partial(saved_tensors, meta), max_file_bytes=60_000)
    assert stored(tmp_path / "export").keys() == names
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert torch.equal(logits(again), logits(theirs))


def test_files_with_the_names_of_the_modules_are_read_too(tmp_path):
    """What exports held before, and `save_pretrained(save_original_format=False)` writes."""
    config = config_of("mixtral")
    theirs = drawn(config)
    theirs.save_pretrained(tmp_path, save_original_format=False)
    assert "model.layers.0.mlp.experts.gate_up_proj" in stored(tmp_path)
    ours = drawn(config, seed=1)
    load_hf(ours, tmp_path, tensors=partial(present_tensors, meta_model(config)))
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize("family", ["camembert", "xlm-roberta", "gpt_neox"])
def test_a_tied_head_is_read_under_either_name(family, tmp_path):
    """Of the first two the head comes before the model, and files have the embedding alone."""
    config = AutoConfig.for_model(family, **SIZES, is_decoder=True, tie_word_embeddings=True)
    theirs = drawn(config)
    theirs.save_pretrained(tmp_path / "hub")
    ours, meta = drawn(config, seed=1), meta_model(config)
    load_hf(ours, tmp_path / "hub", tensors=partial(present_tensors, meta))
    assert torch.equal(logits(ours), logits(theirs))
    save_hf(ours, tmp_path / "export", tensors=partial(saved_tensors, meta))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "export").eval()
    assert torch.equal(logits(again), logits(theirs))


def without(directory: Path, *names: str) -> None:
    weights = load_file(directory / "model.safetensors")
    for name in names:
        del weights[name]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})


EXPERT = "model.layers.1.block_sparse_moe.experts"


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ([f"{EXPERT}.5.w2.weight"], r"mlp\.experts\.down_proj is made[\s\S]*without experts\.5\.w2\.weight"),
        ([f"{EXPERT}.11.w3.weight"], r"gate_up_proj is made[\s\S]*without experts\.11\.w3\.weight"),
        ([f"{EXPERT}.{number}.w1.weight" for number in range(12)], r"without experts\.0\.w1\.weight"),
        (
            [f"{EXPERT}.11.{name}.weight" for name in ("w1", "w2", "w3")],
            r"\(11, 32, 48\), of 11 tensors up to .*experts\.10\.w2",
        ),
        (
            [f"{EXPERT}.{number}.w2.weight" for number in range(12)],
            r"down_proj: this model \(12, 32, 48\), directory nothing",
        ),
    ],
    ids=["one", "last of three", "all of a kind", "the last", "all of a tensor"],
)  # fmt: skip
def test_experts_that_are_missing_are_named(missing, message, tmp_path):
    config = config_of("mixtral")
    drawn(config).save_pretrained(tmp_path)
    without(tmp_path, *missing)
    model = drawn(config, seed=1)
    before = logits(model)
    with pytest.raises(CheckpointError, match=message):
        load_hf(model, tmp_path, tensors=partial(present_tensors, meta_model(config)))
    assert torch.equal(logits(model), before)


def test_experts_in_eight_bits_are_refused(tmp_path):
    """DeepSeek-V3's own files: FP8 with a scale beside every block."""
    config = config_of("deepseek_v3")
    drawn(config).save_pretrained(tmp_path)
    name = f"{MLP}.experts.3.up_proj.weight"
    weights = load_file(tmp_path / "model.safetensors")
    weights[name] = weights[name].to(torch.float8_e4m3fn)
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"gate_up_proj: F8_E4M3 in the directory, which needs a scale"):
        load_hf(drawn(config), tmp_path, tensors=partial(present_tensors, meta_model(config)))


def through(case: Case, directory: Path) -> dict[str, Tensor]:
    config = run_config(case, "fp32", 1)
    config = replace(config, model=replace(config.model, name=str(directory / "hub"), weights="pretrained"))
    session = apply(config, workload(config, model_config("mixtral")), device=torch.device("cpu"))
    export_hf(session, directory / f"export-{case.zero}-{case.tensor}", directory / "tokenizer")
    return full(parameters_of(session))


@pytest.mark.parametrize(
    "case", [Case(data=2, zero=3), Case(tensor=2, zero=0)], ids=["data2-zero3", "tensor2"]
)
def test_ranks_read_and_write_their_parts_of_experts(case, tmp_path):
    theirs = drawn(model_config("mixtral"))
    theirs.save_pretrained(tmp_path / "hub", max_shard_size="20KB")
    train_tokenizer(["some text"], 300).save_pretrained(tmp_path / "tokenizer")
    read = run_ranks(case.world, through, case, tmp_path, timeout=240)[0]
    assert all(torch.equal(read[name], parameter) for name, parameter in theirs.named_parameters())
    written = stored(tmp_path / f"export-{case.zero}-{case.tensor}")
    right = stored(tmp_path / "hub")
    assert written.keys() == right.keys()
    assert all(torch.equal(written[name], value) for name, value in right.items())
