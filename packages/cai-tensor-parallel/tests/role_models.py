"""Small models with experts, latent attention, sinks and few key/value heads, in float64."""

from __future__ import annotations

import torch
from small_models import SMALL, in_float64
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

HEADS = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
LATENT = {**SMALL, "num_key_value_heads": 4, "intermediate_size": 48, "moe_intermediate_size": 16, "q_lora_rank": 8,
          "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
          "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}  # fmt: skip
MODELS = {
    "mixtral": {**HEADS, **EXPERTS},
    "qwen3_moe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "deepseek_v2": {**LATENT, "head_dim": 4},
    "deepseek_v3": {**LATENT, "head_dim": 4},
    "gpt_oss": {**HEADS, **EXPERTS, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "llama4_text": {**HEADS, **EXPERTS, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 1},
    "granitemoe": {**HEADS, **EXPERTS},
    "mimo_v2_flash": {**HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                      "layer_types": ["full_attention", "sliding_attention"], "v_head_dim": 8, "sliding_window": 4,
                      "n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse"]},
    "beam": {**HEADS, "num_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2,
             "moe_intermediate_size": 16, "layer_types": ["full_attention", "full_attention"],
             "mlp_layer_types": ["dense", "sparse"]},
    "qwen2_moe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                  "shared_expert_intermediate_size": 16},
    "olmoe": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {**HEADS, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2,
                 "topk_group": 1, "first_k_dense_replace": 1},
    "phimoe": {**HEADS, **EXPERTS, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
    "jamba": {**HEADS, "num_experts": 4, "num_experts_per_tok": 2, "use_mamba_kernels": False, "mamba_d_state": 4,
              "expert_layer_period": 2, "expert_layer_offset": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
    "dbrx": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 64, "vocab_size": SMALL["vocab_size"],
             "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 10000.0},
             "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 16, "moe_num_experts": 4, "moe_top_k": 2}},
    "llama": HEADS,
    "qwen2": HEADS,
    "qwen3": HEADS,
}  # fmt: skip


def build(name, **options):
    torch.manual_seed(1)
    config = AutoConfig.for_model(name, **MODELS[name] | {"pad_token_id": 0} | options)
    config._experts_implementation = "eager"
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to(torch.float64)
    for name, p in model.named_parameters():
        nn.init.normal_(p, 1.0 if "norm" in name else 0.0, 0.2)
    model.loss_function = in_float64
    return model
