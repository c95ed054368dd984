"""Linear layer and cross-entropy in one: function, its split form, log-probabilities, reference and kernels.

    loss = cross_entropy(x wᵀ + b, target)

The logits exist a chunk of rows at a time, or a slice of the vocabulary.
"""

from cai_kernels.linear_cross_entropy.function import linear_cross_entropy
from cai_kernels.linear_cross_entropy.log_probs import linear_log_probs
from cai_kernels.linear_cross_entropy.loss_products import LossProducts
from cai_kernels.linear_cross_entropy.split import (
    linear_cross_entropy_forward,
    linear_cross_entropy_input_grad,
    linear_cross_entropy_weight_grad,
)

__all__ = [
    "LossProducts",
    "linear_cross_entropy",
    "linear_cross_entropy_forward",
    "linear_cross_entropy_input_grad",
    "linear_cross_entropy_weight_grad",
    "linear_log_probs",
]
