"""Small models of transformers, prompts of uneven lengths, and what transformers' own generate writes."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

WORDS = 199
COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": WORDS,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "eos_token_id": None,
}
KINDS = {
    "llama": {},
    "qwen3": {"head_dim": 16},
    "gemma3_text": {
        "head_dim": 16,
        "sliding_window": 8,
        "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "gemma2": {"head_dim": 16, "sliding_window": 8},
    "mistral": {"sliding_window": 9},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 8},
    "granite": {},
    "gpt2": {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "opt": {"ffn_dim": 128, "word_embed_proj_dim": 64},
    "deepseek_v3": {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 32,
        "kv_lora_rank": 16,
        "q_lora_rank": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 12,
        "num_key_value_heads": 4,
    },
}


def small_model(kind: str, **options):
    """A random model in float32, whose eos is no token unless options say so."""
    torch.manual_seed(1)
    config = AutoConfig.for_model(kind, **(COMMON | KINDS[kind] | options))
    return AutoModelForCausalLM.from_config(config).float().eval()


def prompts(count: int, seed: int = 3, longest: int = 60) -> list[list[int]]:
    """Random ids, every third prompt beginning as the one before it does."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for number in range(count):
        length = int(torch.randint(1, longest, (), generator=generator))
        ids = torch.randint(1, WORDS, (length,), generator=generator).tolist()
        drawn.append(drawn[-1][: longest // 2] + ids[:8] if number % 3 == 2 else ids)
    return drawn


def written(model, prompt: list[int], tokens: int, **options) -> list[int]:
    """What transformers writes after a prompt, the likeliest token each time."""
    ids = torch.tensor([prompt])
    options = {"do_sample": False, "attention_mask": torch.ones_like(ids), "max_new_tokens": tokens} | options
    return model.generate(ids, **options)[0, len(prompt) :].tolist()
