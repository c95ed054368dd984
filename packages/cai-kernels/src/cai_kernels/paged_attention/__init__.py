"""Attention over a paged cache of keys and values, for decoding: functions, reference and kernels."""

from cai_kernels.paged_attention.function import paged_append_, paged_attention

__all__ = ["paged_append_", "paged_attention"]
