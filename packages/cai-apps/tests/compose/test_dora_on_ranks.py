"""Lengths of rows (DoRA) where tensor-parallel ranks cut the layer: peft's in one process, gradients, three steps."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from cai_apps.compose.dora import MAGNITUDES, is_linear, row_squares, scale_rows
from cai_mesh.layout import BoxedTensor, layout_of
from cai_mesh.testing import assert_same_as_one_device, run_ranks
from cai_tensor_parallel import parallelize

peft = pytest.importorskip("peft")

VOCAB, LENGTH = 103, 12
HEADS = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
         "vocab_size": VOCAB, "intermediate_size": 48, "tie_word_embeddings": False}  # fmt: skip
MODELS = {
    "llama": HEADS,
    "qwen2": HEADS,
    "phi3": HEADS | {"pad_token_id": 0},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": VOCAB, "n_positions": 32, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 0, "eos_token_id": 0},
    "deepseek_v2": HEADS | {"head_dim": 4, "num_key_value_heads": 4, "q_lora_rank": 12, "kv_lora_rank": 8,
                            "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 2},
}  # fmt: skip
"""Columns, rows, packed columns and latent attention; qwen2 has biases beside key/value heads, gpt2 beside all."""
OUTPUT = ("llama", "qwen2")
"""Models whose output layer has an adapter, too: their vocabulary does not divide over the ranks."""


def base_model(name: str) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **MODELS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").double()
    for key, param in model.named_parameters():
        nn.init.normal_(param, 1.0 if "norm" in key or "ln_" in key else 0.0, 0.2)
    model.loss_function = lambda logits, labels, **_: nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    )
    return model.requires_grad_(False)


def adapted(name: str, *, of_peft: bool) -> nn.Module:
    """A model whose adapters have learned something, with lengths of rows as peft keeps them, or as they are here."""
    model = base_model(name)
    targets = [
        layer
        for layer, module in model.named_modules()
        if is_linear(module) and (layer != "lm_head" or name in OUTPUT)
    ]
    options = peft.LoraConfig(r=3, lora_alpha=5, use_dora=of_peft, target_modules=targets)
    peft.inject_adapter_in_model(options, model)
    if not of_peft:
        scale_rows(model)
    torch.manual_seed(2)
    for key, param in sorted(model.double().named_parameters()):
        if not param.requires_grad:
            continue
        nn.init.normal_(param, 0.0, 0.3)
        if of_peft and key.endswith(MAGNITUDES):
            param.data += lengths_of(model, key)
    return model


def lengths_of(model: nn.Module, name: str) -> torch.Tensor:
    return row_squares(model.get_submodule(name.removesuffix(MAGNITUDES)).base_layer).sqrt()


def learned(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: param for name, param in model.named_parameters() if param.requires_grad}


def train(model: nn.Module):
    """Losses of three steps, the first gradients and the last weights of what learns."""
    optimizer = torch.optim.AdamW(learned(model).values(), lr=1e-2, weight_decay=0.0)
    losses, gradients = [], {}
    for step in range(3):
        ids = torch.randint(1, VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(step))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        gradients = gradients or {n: BoxedTensor.like(p, p.grad.clone()) for n, p in learned(model).items()}
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, gradients, {n: BoxedTensor.from_param(p) for n, p in learned(model).items()}


def on_ranks(cases: tuple[tuple[str, dict], ...]):
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    results = []
    for name, options in cases:
        model = parallelize(adapted(name, of_peft=False), mesh, **options)
        cut = {n for n, p in learned(model).items() if layout_of(p).sharded_axes}
        losses, *boxed = train(model)
        results.append(
            (losses, *({n: b.to_full(mesh.get_group()) for n, b in some.items()} for some in boxed), cut)
        )
    return results


CASES = {
    2: (*((name, {}) for name in MODELS), *((name, {"sequence": True}) for name in MODELS)),
    4: (("qwen2", {}), ("qwen2", {"sequence": True}), ("gpt2", {})),
}
"""By number of ranks; four share two key/value heads."""


@functools.cache
def of_ranks(ranks: int):
    return run_ranks(ranks, on_ranks, CASES[ranks], timeout=400)


@functools.cache
def of_peft(name: str):
    """The plain loop; lengths are given less those of the base."""
    model = adapted(name, of_peft=True)
    losses, gradients, last = train(model)
    values = {n: b.to_full(None) for n, b in last.items()}
    for key in (key for key in values if key.endswith(MAGNITUDES)):
        values[key] = values[key] - lengths_of(model, key)
    return losses, {n: b.to_full(None) for n, b in gradients.items()}, values


@pytest.mark.parametrize(
    ("ranks", "index"), [(ranks, index) for ranks, cases in CASES.items() for index in range(len(cases))]
)
def test_lengths_of_rows_equal_peft_in_one_process(ranks, index):
    losses, gradients, last = of_peft(CASES[ranks][index][0])
    for results in of_ranks(ranks):
        got_losses, got_gradients, got_last, _ = results[index]
        assert got_losses == pytest.approx(losses, rel=1e-6)
        assert_same_as_one_device(got_gradients, gradients, tolerance=1e-5)
        assert_same_as_one_device(got_last, last, tolerance=1e-5)


def test_lengths_are_cut_beside_columns_and_whole_beside_rows():
    cut, shared = of_ranks(2)[0][0][-1], of_ranks(4)[0][0][-1]
    attention = "model.layers.0.self_attn."
    assert f"{attention}q_proj{MAGNITUDES}" in cut
    assert f"{attention}o_proj{MAGNITUDES}" not in cut
    assert f"{attention}k_proj{MAGNITUDES}" not in shared
