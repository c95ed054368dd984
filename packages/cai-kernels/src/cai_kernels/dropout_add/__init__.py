"""Dropout joined with a residual sum: function, reference and kernel."""

from cai_kernels.dropout_add.function import dropout_add

__all__ = ["dropout_add"]
