"""Residual sum and root-mean-square norm in one: function, reference and kernel.

    s = x + r
    y = w s / sqrt(mean(s^2) + eps)

r is the residual stream; the mean is over the last dim.
"""

from cai_kernels.add_rms_norm.function import add_rms_norm

__all__ = ["add_rms_norm"]
