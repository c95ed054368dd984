"""The norm of many tensors: function, reference and kernel.

    n = (sum |x|^p)^(1/p)

The sum is over all values of all tensors.
"""

from cai_kernels.global_norm.function import global_norm

__all__ = ["global_norm"]
