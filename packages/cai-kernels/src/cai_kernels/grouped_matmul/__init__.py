"""One matmul per expert over its rows: function, reference, Triton kernel and torch's kernel.

    y[t] = x[t] w[e]  for offsets[e] <= t < offsets[e + 1]

The rows of x are in the order of their experts e.
"""

from cai_kernels.grouped_matmul.function import grouped_matmul

__all__ = ["grouped_matmul"]
