"""Softmax with scale, mask and biases: function, reference and kernel.

    y = exp(u) / sum exp(u)
    u = scale x + biases

The sum is over the last dim, where the mask is true; y is 0 elsewhere.
"""

from cai_kernels.softmax.function import softmax

__all__ = ["softmax"]
