"""Small models of transformers in float64, their loss, and full tensors of what ranks hold of them."""

from __future__ import annotations

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from cai_mesh.layout import BoxedTensor

SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 101}
MODELS = {
    "llama": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 101, "n_positions": 32, "resid_pdrop": 0.0,
             "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "qwen3": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8},
    "phi3": {**SMALL, "intermediate_size": 48, "num_key_value_heads": 2, "pad_token_id": 0},
}  # fmt: skip


def build(name: str, **options) -> nn.Module:
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **MODELS[name] | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float64)
    for name, p in model.named_parameters():  # away from the zeros and ones that hide mistakes
        nn.init.normal_(p, 1.0 if "norm" in name or "ln_" in name else 0.0, 0.2)
    return model


def in_float64(logits, labels, vocab_size, **_):
    """What stands for a model's `loss_function`, which computes in float32."""
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def full(boxed: dict[str, BoxedTensor], group=None) -> dict[str, torch.Tensor]:
    return {n: b.to_full(group) for n, b in boxed.items()}
