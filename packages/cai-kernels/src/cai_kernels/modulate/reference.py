"""Adaptive layer norm and its gate in plain torch (Peebles and Xie, arXiv:2212.09748)."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def modulate(x: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor, eps: float) -> torch.Tensor:
    """x [N, T, C], scale, shift [N, C] -> [N, T, C] in x's dtype; computed in float32 (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale, shift = (t.to(wide.dtype)[:, None] for t in (scale, shift))
    return (F.layer_norm(wide, wide.shape[-1:], eps=eps) * (1 + scale) + shift).to(x.dtype)


def gate_add(residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """residual, x [N, T, C], gate [N, C] -> residual + gate * x in x's dtype; in float32 (float64 stays)."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return (residual.to(dtype) + gate.to(dtype)[:, None] * x.to(dtype)).to(x.dtype)
