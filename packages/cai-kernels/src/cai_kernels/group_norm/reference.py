"""Group norm in plain torch (Wu and He, arXiv:1803.08494), its layout kept."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    silu: bool,
) -> torch.Tensor:
    """x [N, C, ...], weight and bias [C] or None -> x's shape, dtype and strides; in float32 (float64 stays)."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    samples, channels = x.shape[:2]
    group_channels = channels // groups
    grouped = wide.reshape(samples, groups, group_channels * x[:1, :1].numel() if samples else 0)
    mean = grouped.mean(-1)
    rstd = torch.rsqrt((grouped - mean[..., None]).square().mean(-1) + eps)
    ones = (1,) * (x.dim() - 2)
    mean, rstd = (t.repeat_interleave(group_channels, 1).view(samples, channels, *ones) for t in (mean, rstd))
    y = (wide - mean) * rstd
    if weight is not None:
        y = y * weight.to(wide.dtype).view(channels, *ones)
    if bias is not None:
        y = y + bias.to(wide.dtype).view(channels, *ones)
    return (F.silu(y) if silu else y).to(x.dtype)
