"""GELU of a biased input in plain torch (Hendrycks and Gimpel, arXiv:1606.08415)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def gelu_bias(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
    """x [..., F], bias [F] -> gelu(x + bias) [..., F]."""
    return F.gelu(x + bias, approximate=approximate)
