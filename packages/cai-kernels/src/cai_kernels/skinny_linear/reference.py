"""Linear layers of one input in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional as F


def linears(
    hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """hidden [rows, inputs], weights [outputs, inputs], biases [outputs] or none -> [rows, outputs] of each layer."""
    pairs = zip(weights, biases or [None] * len(weights), strict=True)
    return [F.linear(hidden, weight, bias) for weight, bias in pairs]
