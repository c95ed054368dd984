"""A tiny config for any model of transformers: generic by the names of its sizes, then a few extras."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 96
RESERVED = 8
"""Token ids below this stand for padding and the like; training data has none of them."""
LENGTH = 16
PARAMETER_LIMIT = 3_000_000
MOST_LAYERS = 6

SIZES: list[tuple[str, int]] = [
    (
        r"max_(position_embeddings|window_layers|seq_len|source_positions|target_positions)|n_positions|n_ctx",
        64,
    ),
    (r"original_max_position_embeddings|model_max_length|context_length", 64),
    (r"(pad|padding)_(token_)?(id|idx|index)", 0),
    (r"bos_(token_id|index)|start_token_id|decoder_start_token_id", 1),
    (r".*_token_(id|index|ids)|.*_idx|.*_index|eos_index", 2),
    (r"(moe|shared_expert|expert|moe_shared_expert).*(intermediate|ffn_hidden)_size|shared_experts_.*", 32),
    (
        r".*(intermediate_size.*|ffn_dim|ffn_hidden_size|feed_forward_size)|n_inner|d_ff|dff|d_inner|dim_ff",
        96,
    ),
    (r"type_vocab_size|.*_type_vocab_size", 2),
    (r".*vocab_size.*|.*_group_vocab", VOCAB),
    (r"hidden_size\w*|d_model|n_embd|emb_dim|embedding_dim|embedding_size|word_embed_proj_dim|lru_width", 64),
    (r"adapter_(in|out)\w*", 64),
    (r"attention_hidden_size|.*_embedding_size|.*_embed_dim|cross_attention_hidden_size", 64),
    (r"(n|num).*(routed_|local_)?experts|moe_num_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?|moe_(top)?k|num_selected_experts", 2),
    (r"(n|num).*(shared_experts|_groups?|expert_group)|topk_group|mamba_ngroups", 1),
    (r".*(num|n)_.*(key_value|kv|key|query)_?(heads|groups)", 2),
    (r".*mamba.*heads", 8),
    (r".*heads|n_head", 4),
    (r"num_kv_shared_layers|first_k_dense_replace|num_dense_layers|num_nextn_predict_layers", 1),
    (r"(.*_)?(n|num)?_?.*(layers|blocks)|n_layer|num_layers_per_stack", 2),
    (r".*chunk_size|.*chunk_length|.*window(_size|_len)?|local_attention|block_size|index_block_size", 8),
    (r"index_topk", 4),
    (r".*channels", 32),
    (r"qk_head_dim", 32),
    (r"rotary_dim|.*rank|.*state(_size)?|d_rel", 8),
    (r".*head_(dim|size)|.*headdim|d_head|.*_d_head|dim_head|kv_channels|d_kv", 16),
    (r".*(_size|_dim|_base|_buckets|_distance)", 32),
]
"""Names of sizes and what they become at most; the first pattern that matches the whole name counts."""

UNSET = ("head_dim", "num_key_value_heads", "n_routed_experts", "num_experts_per_tok")
"""Sizes that some configs leave open although their models need them."""

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
EXTRAS: dict[str, dict[str, Any]] = {
    "blt": {"encoder_hash_byte_group_size": [3, 4]},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "distilbert": {"dim": 64, "hidden_dim": 96},
    "doge": {"keep_window_size": 64},  # it keeps the largest of values that are all equal at the start
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": {
        **{f"swa_{name}": 4 for name in ("num_attention_heads", "num_key_value_heads")},
        **{f"swa_{name}": 8 for name in ("q_lora_rank", "kv_lora_rank")},
        **{f"swa_{name}": 16 for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")},
        "swa_head_dim": 32,
        "head_dim": 32,
        "use_dsa": True,
    },
    "encoder-decoder": {"pad_token_id": 0},
    "esm": {"vocab_size": VOCAB, "pad_token_id": 0, "mask_token_id": 2},
    "esmc": {"vocab_size": VOCAB},
    "flint": {"mlp_only_layers": [0]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "intermediate_size": 96,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "activation_sparsity_pattern": [0.0] * 4,
    },
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "lfm2_moe": {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "mamba2": {"num_heads": 8},
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "nystromformer": {"conv_kernel_size": 15},
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "reformer": {"axial_pos_shape": [4, 4], "axial_pos_embds_dim": [16, 48]},
    "vibevoice_acoustic_tokenizer_encoder": {"num_filters": 2},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 6400},
    "xmod": {"default_language": "en_XX"},
    "zamba": {
        "attention_hidden_size": 128,
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "zamba2": {"attention_hidden_size": 128},
}
"""What single types need besides, by the model type of the (inner) config: sizes that are tied to one another."""


class NotBuilt(Exception):
    """transformers cannot build this type here, or its own loop does not run."""


def model_types() -> list[str]:
    """Every model type that transformers has a causal language model for."""
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@dataclass(frozen=True)
class Small:
    """What makes a config small.

    Args:
        sizes: as `SIZES`.
        extras: as `EXTRAS`.
        lists: whether a list of sizes is made small in each place, whatever the number of layers.
        kept: names that stay as they are.
    """

    sizes: Sequence[tuple[str, int]]
    extras: Mapping[str, Mapping[str, Any]]
    lists: bool = False
    kept: tuple[str, ...] = ()

    def size_of(self, name: str) -> int | None:
        """What a size of this name is at most; None: it is no size."""
        return next((most for pattern, most in self.sizes if re.fullmatch(pattern, name)), None)


TEXT = Small(SIZES, EXTRAS)


def tiny(model_type: str, small: Small = TEXT) -> PretrainedConfig:
    """A config of a few thousand parameters: small sizes, every kind of layer at least once, no dropout, no cache.

    Raises NotBuilt when transformers refuses the values.
    """
    try:
        config = _shrink(CONFIG_MAPPING[model_type](), small)
    except Exception as error:
        raise NotBuilt(f"its config refuses small sizes: {first_line(error.__cause__ or error)}") from error
    for part in _parts(config):
        part.use_cache = False
        for name, value in list(vars(part).items()):
            if isinstance(value, float) and "drop" in name:
                setattr(part, name, 0.0)
    return config


def _shrink(config: PretrainedConfig, small: Small) -> PretrainedConfig:
    """A small version of `config`: what differs is given to its constructor, which derives the rest."""
    extras = small.extras.get(config.model_type, {})
    values: dict[str, Any] = {}
    layers, count = _layers(config), getattr(config, "num_hidden_layers", None)
    for name, value in vars(config).items():
        unset = name in UNSET and value is None
        less = small.size_of(name) if unset else _small(name, value, layers, small, count)
        if less is not value and name not in small.kept:
            values[name] = less
    values |= _heads(config)
    if vars(config).get("is_decoder") is False and not config.is_encoder_decoder:
        values["is_decoder"] = True
    name = config.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    if layers and name in vars(config):
        values[name] = len(layers)
    return type(config)(**{**values, **extras})


def _heads(config: PretrainedConfig) -> dict[str, int]:
    """Key/value heads: as many as query heads where that is so in the whole model, else half as many."""
    own = [config.attribute_map.get(name, name) for name in ("num_attention_heads", "num_key_value_heads")]
    heads, shared = (vars(config).get(name) for name in own)
    if own[1] not in vars(config) or not isinstance(heads, int):
        return {}
    return {own[1]: min(heads, 4) if shared in (None, heads) else min(shared, 2)}


def _small(name: str, value: Any, layers: list[int], small: Small, count: Any = None) -> Any:
    """The small version of one value; the very same object where it may stay."""
    if isinstance(value, PretrainedConfig):
        return _shrink(value, small)
    if isinstance(value, bool) or name.startswith("_"):
        return value
    if isinstance(value, float) and re.search("drop|_pdrop|jitter|mask_.*_prob", name) and value:
        return 0.0
    if isinstance(value, int):
        most = small.size_of(name)
        return value if most is None or value <= most else most
    if isinstance(value, list) and name.endswith(("token_id", "token_ids", "suppress_tokens")):
        return [min(v, RESERVED - 1) for v in value]
    if isinstance(value, list) and layers and len(value) == count:
        return [_small(name, value[i], [], small) for i in layers]
    if small.lists and isinstance(value, list | tuple):
        return type(value)(_in_place(name, each, small) for each in value)
    return value


def _in_place(name: str, value: Any, small: Small) -> Any:
    """One of a list of sizes: heads become a power of two, which divides the widths."""
    less = _small(name, value, [], small)
    if re.search("heads", name) and isinstance(less, int):
        return 1 << (less.bit_length() - 1)
    return less


def _layers(config: PretrainedConfig) -> list[int]:
    """Which layers of the whole model a small one has: each kind that lists of the config name, and at least two."""
    count = getattr(config, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 2:
        return []
    lists = [v for v in vars(config).values() if isinstance(v, list) and len(v) == count]
    named = [v for v in lists if isinstance(v[0], str)]
    first: dict[tuple[str, ...], int] = {}
    for layer in range(count):
        first.setdefault(tuple(v[layer] for v in named), layer)
    chosen = sorted(first.values())[:MOST_LAYERS]
    return chosen if len(chosen) > 1 else [0, 1]


def _parts(config: PretrainedConfig) -> list[PretrainedConfig]:
    inner = [v for v in vars(config).values() if isinstance(v, PretrainedConfig)]
    return [config, *(part for each in inner for part in _parts(each))]


def first_line(error: BaseException) -> str:
    """An error's type and the first line of its message that says something, without paths of this machine."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return re.sub(r"(/[\w.+-]+){2,}/", "", text)[:300]
