"""Means over what a mask leaves."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1e-8


def mean(x: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of each sample, [B]; 0 where nothing is left. Args: x, mask: [B, ...], shapes that broadcast."""
    weight = torch.broadcast_to(mask.to(x.dtype), x.shape)
    dims = tuple(range(1, x.dim()))
    return (x * weight).sum(dims) / (weight.sum(dims) + EPS)


def cross_entropy(scores: Tensor, number: Tensor) -> Tensor:
    """Return the cross entropy of each row of scores [..., bins] with the number of its bin [...], float32 or wider."""
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
    return -wide.log_softmax(-1).gather(-1, number[..., None])[..., 0]
