"""A layer of experts: function, its form in parts, and the kernel of what stands between its two products.

    y[t] = sum over k of weights[t, k] (a(x[t] up[e] + b[e]) down[e] + c[e]),  e = ids[t, k]

The activation a multiplies two halves of its input, one of them through SiLU or GELU, or is any function of a row.
"""

from cai_kernels.experts.function import expert_layer
from cai_kernels.experts.reference import AdaptedExperts, ExpertGate

__all__ = ["AdaptedExperts", "ExpertGate", "expert_layer"]
