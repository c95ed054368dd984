"""Attention with a pair bias and a gate, as protein models have it: function and reference."""

from cai_kernels.pair_bias_attention.function import pair_bias_attention

__all__ = ["pair_bias_attention"]
