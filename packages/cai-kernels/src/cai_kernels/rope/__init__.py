"""Rotary position embedding: function, reference and kernel."""

from cai_kernels.rope.function import rope

__all__ = ["rope"]
