"""Root-mean-square norm: function, reference and kernel.

    y = w x / sqrt(mean(x^2) + eps)

The mean is over the last dim; w is 1 + w in Gemma's form.
"""

from cai_kernels.rms_norm.function import rms_norm

__all__ = ["rms_norm"]
