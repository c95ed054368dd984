"""RMSNorm in plain torch (Zhang and Sennrich, arXiv:1910.07467), with LLaMA's or Gemma's order of casts."""

from __future__ import annotations

import torch


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str = "llama"
) -> torch.Tensor:
    """x [..., D], weight [D] or None -> [..., D]: normalized in float32 (float64 stays), then weighted.

    "llama": cast to x's dtype, then `weight * normalized`. "gemma": `normalized * (1 + weight)`, then cast.
    """
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normalized = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if casting == "gemma" and weight is not None:
        return (normalized * (1.0 + weight.to(wide.dtype))).to(x.dtype)
    return normalized.to(x.dtype) if weight is None else weight * normalized.to(x.dtype)
