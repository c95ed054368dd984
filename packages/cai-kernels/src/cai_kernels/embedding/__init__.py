"""Embedding with a deterministic gradient: function, reference and kernel."""

from cai_kernels.embedding.function import embedding

__all__ = ["embedding"]
