"""Layer norm: function, reference and kernel."""

from cai_kernels.layer_norm.function import layer_norm

__all__ = ["layer_norm"]
