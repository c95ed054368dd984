"""Attention with a pair bias and a gate, as protein models have it: function and reference.

    out = sigmoid(gate) softmax(scale q kᵀ + bias + mask) v

Rows of a batch share the bias of each pair of positions.
"""

from cai_kernels.pair_bias_attention.function import pair_bias_attention

__all__ = ["pair_bias_attention"]
