"""The sum of a residual stream and its RMSNorm (Zhang and Sennrich, arXiv:1910.07467) in plain torch."""

from __future__ import annotations

import torch

from cai_kernels.rms_norm import reference


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, eps: float, casting: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """x, residual [..., D], weight [D] or None -> (rms_norm(x + residual), x + residual), the sum in their dtype."""
    total = x + residual
    return reference.rms_norm(total, weight, eps, casting), total
