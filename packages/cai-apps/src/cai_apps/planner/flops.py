"""Floating-point operations of training a causal language model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cai_mesh.experts import visited_share

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of forward and backward for one token, without recompute, in both usual conventions."""

    causal: float
    """Attention counts the positions a token may see: half the square."""
    full: float
    """Attention counts the whole square, as "PaLM" (Chowdhery et al., 2022, appendix B) does."""


def token_flops(model: PreTrainedModel, config: PretrainedConfig, sequence_length: int) -> TokenFlops:
    """6 FLOPs per token and weight, 4 where it is frozen, 12 * layers * width * length for attention.

    `model` is the whole model, its parameters may be on the meta device. An input embedding that is not also
    the output head is a lookup and counts nothing. Of experts those count that a token visits. A config without
    attention heads (a state space model) counts its weights alone.
    """
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings()
    tied = head is not None and head.weight is embedding
    matrices = sum(
        (6 if parameter.requires_grad else 4) * parameter.numel() * visited_share(config, name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and (tied or parameter is not embedding) and not _is_position_table(name)
    )
    heads = getattr(config, "num_attention_heads", None)
    attention = 0
    if isinstance(heads, int):
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        attention = 12 * config.num_hidden_layers * width * sequence_length
    return TokenFlops(causal=matrices + attention / 2, full=matrices + attention)


def _is_position_table(name: str) -> bool:
    return name.endswith(("wpe.weight", "embed_positions.weight", "position_embeddings.weight"))
