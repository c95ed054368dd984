"""The norm of many tensors: function, reference and kernel."""

from cai_kernels.global_norm.function import global_norm

__all__ = ["global_norm"]
