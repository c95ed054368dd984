"""Attention over a paged cache of keys and values, for decoding: functions, reference and kernels.

    out = softmax(scale q kᵀ) v
    k[i], v[i] = caches[table[i // size]][i % size]

A query attends to the keys of its sequence, which lie in blocks of `size` positions anywhere in a cache.
"""

from cai_kernels.paged_attention.function import paged_append_, paged_attention

__all__ = ["paged_append_", "paged_attention"]
