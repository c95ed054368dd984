"""Residual sum and root-mean-square norm in one: function, reference and kernel."""

from cai_kernels.add_rms_norm.function import add_rms_norm

__all__ = ["add_rms_norm"]
