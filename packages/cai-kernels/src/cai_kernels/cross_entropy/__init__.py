"""Cross-entropy: function, its parts for a split vocabulary, reference and kernels.

    loss = lse(x) - (1 - s) x[target] - s mean(x) + z lse(x)^2
    lse(x) = log sum exp(x)

x are the logits of a row, c tanh(x / c) of them under a soft cap c; s is the label smoothing, z the z-loss.
"""

from cai_kernels.cross_entropy.function import cross_entropy
from cai_kernels.cross_entropy.parts import (
    CrossEntropyParts,
    cross_entropy_from_parts,
    cross_entropy_gradient,
    cross_entropy_parts,
)

__all__ = [
    "CrossEntropyParts",
    "cross_entropy",
    "cross_entropy_from_parts",
    "cross_entropy_gradient",
    "cross_entropy_parts",
]
