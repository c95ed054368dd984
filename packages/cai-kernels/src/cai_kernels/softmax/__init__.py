"""Softmax with scale, mask and biases: function, reference and kernel."""

from cai_kernels.softmax.function import softmax

__all__ = ["softmax"]
