"""RMSNorm in plain torch (Zhang and Sennrich, arXiv:1910.07467), with LLaMA's order of casts."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., D], weight [D] -> [..., D]: normalized in float32 (float64 stays), cast to x's dtype, then weighted."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normalized.to(x.dtype)
