"""GELU of a biased input: function, reference and kernel.

    y = gelu(x + b)
    gelu(u) = u Phi(u), about u / 2 (1 + tanh(sqrt(2 / pi) (u + 0.044715 u^3)))

Phi is the distribution function of the normal distribution.
"""

from cai_kernels.gelu_bias.function import gelu_bias

__all__ = ["gelu_bias"]
