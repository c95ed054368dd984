"""Dropout and residual sum in plain torch, of a given mask (Srivastava et al., JMLR 15, 2014)."""

from __future__ import annotations

import torch

from cai_kernels.ops import define


def dropout_add(x: torch.Tensor, residual: torch.Tensor, keep_mask: torch.Tensor, p: float) -> torch.Tensor:
    """residual + x / (1 - p) where `keep_mask` is true, else residual; float32 inside (float64 stays), x's dtype."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dropped = wide * keep_mask * (1.0 / (1.0 - p) if p < 1.0 else 0.0)
    return (residual.to(wide.dtype) + dropped).to(x.dtype)


def _torch_dropout_mask(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    """Mask of the values of x that torch's generator keeps under this seed: bool. Reads the seed on the host."""
    random = torch.Generator(x.device).manual_seed(int(seed) % 2**63)
    return torch.rand(x.shape, device=x.device, generator=random) >= p


def _empty(x: torch.Tensor, p: float, seed: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape, dtype=torch.bool)


dropout_mask = define(_torch_dropout_mask, _empty)
