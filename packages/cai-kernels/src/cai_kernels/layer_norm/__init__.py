"""Layer norm: function, reference and kernel.

    y = w (x - mean(x)) / sqrt(var(x) + eps) + b

Mean and variance are over the last dim.
"""

from cai_kernels.layer_norm.function import layer_norm

__all__ = ["layer_norm"]
