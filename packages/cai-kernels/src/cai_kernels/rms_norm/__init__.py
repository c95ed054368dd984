"""Root-mean-square norm: function, reference and kernel."""

from cai_kernels.rms_norm.function import rms_norm

__all__ = ["rms_norm"]
