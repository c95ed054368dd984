"""One matmul per expert over its rows: function, reference, Triton kernel and torch's kernel."""

from cai_kernels.grouped_matmul.function import grouped_matmul

__all__ = ["grouped_matmul"]
