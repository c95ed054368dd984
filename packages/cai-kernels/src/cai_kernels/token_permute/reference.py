"""Tokens to the order of their experts and back, in plain torch."""

from __future__ import annotations

import torch


def expert_order(expert_ids: torch.Tensor, n_experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """expert_ids [T, K] -> (index [T, K], offsets [E + 1]), both int32; see `token_permute` for what they say."""
    flat = expert_ids.reshape(-1)
    routed = (flat >= 0) & (flat < n_experts)
    key = torch.where(routed, flat, n_experts)
    ordered, order = torch.sort(key, stable=True)
    row = torch.empty_like(order).scatter_(0, order, torch.arange(flat.numel(), device=flat.device))
    offsets = torch.searchsorted(ordered, torch.arange(n_experts + 1, device=flat.device, dtype=key.dtype))
    return torch.where(routed, row, -1 - row).int().view(expert_ids.shape), offsets.int()


def spread(x: torch.Tensor, index: torch.Tensor, rows: int) -> torch.Tensor:
    """x [T, D], index [T, K] -> [rows, D]: every token at the rows of its choices, zeros where one is dropped."""
    flat = index.reshape(-1).long()
    routed = flat >= 0
    choice = torch.arange(flat.numel(), device=x.device)
    source = torch.empty_like(choice).scatter_(0, torch.where(routed, flat, -1 - flat), choice)[:rows]
    tokens = x[source // index.shape[1]] if flat.numel() else x.new_zeros(0, x.shape[1])
    return torch.where(routed[source, None], tokens, torch.zeros_like(tokens))


def collect(y: torch.Tensor, index: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """y [rows, D], index [T, K], weights [T, K] -> [T, D]: the weighted sum over K in float32 (float64 stays)."""
    flat = index.reshape(-1).long()
    routed = (flat >= 0)[:, None]
    wide = torch.promote_types(y.dtype, torch.float32)
    values = y[torch.where(routed[:, 0], flat, 0)] if len(y) else y.new_zeros(flat.numel(), y.shape[1])
    values = torch.where(routed, values, torch.zeros_like(values)).to(wide).view(*index.shape, y.shape[1])
    if weights is not None:
        values = values * weights.to(wide)[..., None]
    return values.sum(1).to(y.dtype)
