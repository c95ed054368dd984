"""Plans as data, by model type, relative to the base model, for classes of transformers that carry none.

Globs that match nothing in a class are left out: a type's classes differ in their parts, and configs in their layers.
Learned positions, norms and convolutions stay whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Names = Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Part:
    """A part of a plan, as the fields of `Plan` say it.

    Args:
        when: values of a config; the part is for configs with all of them.
    """

    roles: Mapping[str, str]
    divided: Names = field(default_factory=dict)
    arguments: Names = field(default_factory=dict)
    when: Mapping[str, Any] = field(default_factory=dict)


def _cut(columns: str, row: str) -> dict[str, str]:
    """Roles of column-cut layers and the row-cut one they feed, from their names in the module before the colon."""
    inside, _, names = columns.rpartition(":")
    return {f"{inside}.{name}": "colwise" for name in names.split()} | {f"{inside}.{row}": "rowwise"}


def _bert() -> Part:
    layer = "encoder.layer.*"
    return Part(
        _cut(f"{layer}.attention:self.query self.key self.value", "output.dense")
        | _cut(f"{layer}:intermediate.dense", "output.dense")
        | {f"{layer}.crossattention.*": "replicated"}
    )


def _t5() -> Part:
    roles = {
        f"{side}.block.*.layer.*.SelfAttention.relative_attention_bias": "colwise"
        for side in ("encoder", "decoder")
    }
    for attention in ("encoder*.SelfAttention", "decoder*.SelfAttention", "decoder*.EncDecAttention"):
        roles |= _cut(f"{attention.replace('*', '.block.*.layer.*')}:q k v", "o")
    for side in ("encoder", "decoder"):
        roles |= _cut(f"{side}.block.*.layer.*.DenseReluDense:wi wi_0 wi_1", "wo")
    return Part(roles, {"*.SelfAttention": ("n_heads",), "*.EncDecAttention": ("n_heads",)})


def _whisper() -> Part:
    roles: dict[str, str] = {}
    for layer in ("encoder.layers.*", "decoder.layers.*"):
        for attention in ("self_attn", "encoder_attn"):
            roles |= _cut(f"{layer}.{attention}:q_proj k_proj v_proj", "out_proj")
        roles |= _cut(f"{layer}:fc1", "fc2")
    return Part(roles, {"*.self_attn": ("num_heads",), "*.encoder_attn": ("num_heads",)})


_FUSED = {"h.*.self_attention.query_key_value": "colwise", "h.*.self_attention.dense": "rowwise"}
"""Roles of BLOOM and Falcon: queries, keys and values of a head, or of heads that share keys, lie side by side."""
_FUSED_MLP = _cut("h.*.mlp:dense_h_to_4h", "dense_4h_to_h")

PLANS: dict[str, tuple[Part, ...]] = {
    "gpt2": (
        Part(
            {
                "h.*.attn.c_attn": "packed_colwise:3",
                "h.*.attn.c_proj": "rowwise",
                "h.*.mlp.c_fc": "colwise",
                "h.*.mlp.c_proj": "rowwise",
            },
            {"h.*.attn": ("split_size", "num_heads")},
        ),
    ),
    "bert": (_bert(),),
    "roberta": (_bert(),),
    "opt": (
        Part(
            _cut("decoder.layers.*.self_attn:q_proj k_proj v_proj", "out_proj")
            | _cut("decoder.layers.*:fc1", "fc2"),
            {"decoder.layers.*.self_attn": ("num_heads",)},
        ),
    ),
    "bloom": (
        Part(
            _FUSED | _FUSED_MLP,
            {"h.*.self_attention": ("num_heads",)},
            {"h.*.self_attention": ("alibi:0:num_heads",)},
        ),
    ),
    "t5": (_t5(),),
    "vit": (
        Part(
            _cut("layers.*.attention:q_proj k_proj v_proj", "o_proj") | _cut("layers.*.mlp:fc1", "fc2"),
        ),
    ),
    "gptj": (
        Part(
            _cut("h.*.attn:q_proj k_proj v_proj", "out_proj") | _cut("h.*.mlp:fc_in", "fc_out"),
            {"h.*.attn": ("num_attention_heads",)},
        ),
    ),
    "falcon": (
        Part(_FUSED_MLP),
        Part(
            _FUSED,
            {"h.*.self_attention": ("num_heads", "num_kv_heads")},
            {"h.*.self_attention": ("alibi:-3:num_heads", "attention_mask:-3:num_heads")},
            when={"new_decoder_architecture": True},
        ),
        Part(
            _FUSED,
            {"h.*.self_attention": ("num_heads", "num_kv_heads")},
            {"h.*.self_attention": ("alibi:-3:num_heads", "attention_mask:-3:num_heads")},
            when={"new_decoder_architecture": False, "multi_query": False},
        ),
    ),
    "stablelm": (
        Part(
            _cut("layers.*.self_attn:q_proj k_proj v_proj", "o_proj")
            | _cut("layers.*.mlp:gate_proj up_proj", "down_proj"),
            {"layers.*.self_attn": ("num_heads", "num_key_value_heads")},
            when={"qk_layernorm": False},
        ),
        Part(_cut("layers.*.mlp:gate_proj up_proj", "down_proj"), when={"qk_layernorm": True}),
    ),
    "whisper": (_whisper(),),
    "gpt_oss": (
        Part(
            _cut("layers.*.self_attn:q_proj k_proj v_proj", "o_proj")
            | {
                "layers.*.self_attn.sinks": "colwise",
                "layers.*.self_attn": "local_params",
                "layers.*.mlp.experts.gate_up_proj": "rowwise",
                "layers.*.mlp.experts.gate_up_proj_bias": "rowwise",
                "layers.*.mlp.experts.down_proj": "colwise",
                "layers.*.mlp.experts": "moe_tp_experts",
            },
        ),
    ),
}
"""The parts of a type's plan. Falcon's attention with one key and value for all heads is not cut, its mlp is; nor is
StableLM's with a norm for every head."""


def built_in(config: Any) -> tuple[dict[str, Any], ...]:
    """Roles, divided attributes and arguments for a config, as in `Plan`; nothing for a type without a plan here."""
    fields: tuple[dict[str, Any], ...] = ()
    for part in PLANS.get(getattr(config, "model_type", None) or "", ()):
        if all(getattr(config, name, None) == value for name, value in part.when.items()):
            fields = fields or ({}, {}, {})
            for all_of, some in zip(fields, (part.roles, part.divided, part.arguments), strict=True):
                all_of.update(some)
    return fields
