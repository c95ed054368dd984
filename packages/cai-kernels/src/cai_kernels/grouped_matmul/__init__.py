"""One matmul per expert over runs of rows: function, reference, kernel and torch's own."""

from cai_kernels.grouped_matmul.function import grouped_matmul

__all__ = ["grouped_matmul"]
