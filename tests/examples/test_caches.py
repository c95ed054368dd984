"""Models of transformers that give their blocks a cache in training, with activations in host memory."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    GPT2Config,
    LlamaConfig,
    T5Config,
)

from cai_gemini import offload_activations

SIZES = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 2}
T5 = {"d_model": 16, "d_kv": 4, "d_ff": 24, "num_layers": 2, "num_heads": 4, "dropout_rate": 0}
BART = {
    **{f"{part}_{what}": 2 for part in ("encoder", "decoder") for what in ("layers", "attention_heads")},
    "d_model": 16,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24,
    "dropout": 0.0,
    "pad_token_id": 1,
}
GPT2 = {"n_embd": 16, "n_layer": 3, "n_head": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
LLAMA = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2}
MODELS = {
    "t5": (AutoModelForSeq2SeqLM, T5Config(**SIZES, **T5)),
    "bart": (AutoModelForSeq2SeqLM, BartConfig(**SIZES, **BART, decoder_start_token_id=2)),
    "gpt2": (AutoModelForCausalLM, GPT2Config(**SIZES, **GPT2)),
    "llama, eager": (AutoModelForCausalLM, LlamaConfig(**SIZES, **LLAMA, attn_implementation="eager")),
}
MODELS["t5"][1].decoder_start_token_id = 0


def results(model, ids):
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_are_those_of_the_plain_model(name):
    kind, config = MODELS[name]
    torch.manual_seed(0)
    model = kind.from_config(config).train()
    plain = copy.deepcopy(model)
    offload_activations(model, smallest=0)
    ids = torch.arange(3, 15).reshape(2, 6)
    assert all(torch.equal(*pair) for pair in zip(results(model, ids), results(plain, ids), strict=True))
