"""Dropout joined with a residual sum: function, reference and kernel.

    y = r + m x / (1 - p)

r is the residual stream, m a random mask that is 0 with probability p, else 1.
"""

from cai_kernels.dropout_add.function import dropout_add

__all__ = ["dropout_add"]
