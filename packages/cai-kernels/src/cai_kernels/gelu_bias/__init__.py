"""GELU of a biased input: function, reference and kernel."""

from cai_kernels.gelu_bias.function import gelu_bias

__all__ = ["gelu_bias"]
