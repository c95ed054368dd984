"""Linear layers with the initial values of section 1.11.4, dropout that rows or columns share (1.11.6), transitions."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Initial = Literal["lecun", "relu", "glorot", "gate", "final"]
CUT = 0.87962566103423978
"""The standard deviation of a normal distribution that is cut off at 2."""


def linear(width: int, out: int, *, bias: bool = True, initial: Initial = "lecun") -> nn.Linear:
    """A linear layer: weights of "lecun" or "relu" from a cut normal, "gate" open (bias 1), "final" zero."""
    layer = nn.Linear(width, out, bias=bias)
    layer.initial = initial  # type: ignore[assignment]
    initialize(layer, initial)
    return layer


@torch.no_grad()
def initialize(layer: nn.Linear, initial: Initial) -> None:
    """Fill a layer, in place."""
    if layer.weight.is_meta:
        return
    if layer.bias is not None:
        layer.bias.fill_(1.0 if initial == "gate" else 0.0)
    if initial == "glorot":
        nn.init.xavier_uniform_(layer.weight)
    elif initial in ("gate", "final"):
        layer.weight.zero_()
    else:
        deviation = math.sqrt((2.0 if initial == "relu" else 1.0) / layer.in_features) / CUT
        nn.init.trunc_normal_(layer.weight, std=deviation, a=-2 * deviation, b=2 * deviation)


def shared_dropout(x: Tensor, rate: float, training: bool, dim: int) -> Tensor:
    """Dropout whose mask is alike along a dimension of x."""
    if not training or not rate:
        return x
    shape = list(x.shape)
    shape[dim] = 1
    return x * F.dropout(x.new_ones(shape), rate)


class Transition(nn.Module):
    """Two layers on each element: Algorithm 9 for an alignment, 15 for a pair.

    Args:
        width: the width of the elements.
        factor: the width of the layer between, as a multiple of `width`.
    """

    def __init__(self, width: int, factor: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.wide = linear(width, factor * width, initial="relu")
        self.out = linear(factor * width, width, initial="final")

    def forward(self, x: Tensor) -> Tensor:
        """The update of x, [..., width]."""
        return self.out(F.relu(self.wide(self.norm(x))))
