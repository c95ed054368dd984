"""Cross-entropy: function, its parts for a split vocabulary, reference and kernels."""

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
