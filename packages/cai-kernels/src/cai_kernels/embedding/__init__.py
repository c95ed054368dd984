"""Embedding with a deterministic gradient: function, reference and kernel.

    y[t] = w[id[t]]
    dw[i] = sum of dy[t] over all t with id[t] = i

The sum is made in a fixed order, so that it has the same bits every time.
"""

from cai_kernels.embedding.function import embedding

__all__ = ["embedding"]
