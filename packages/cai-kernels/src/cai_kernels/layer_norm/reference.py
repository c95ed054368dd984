"""Layer norm in plain torch (Ba et al., arXiv:1607.06450)."""

from __future__ import annotations

import torch


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    """x [..., D], weight and bias [D] or None -> [..., D] in x's dtype; computed in float32 (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = wide - wide.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.to(wide.dtype)
    if bias is not None:
        y = y + bias.to(wide.dtype)
    return y.to(x.dtype)
