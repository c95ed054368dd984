"""Rotary position embedding in plain torch (Su et al., RoFormer, arXiv:2104.09864)."""

from __future__ import annotations

import torch


def angles(
    table: torch.Tensor, position_ids: torch.Tensor | None, interleaved: bool, rotary_dim: int
) -> torch.Tensor:
    """A table [..., R or R/2] as [B or 1, 1, S, R/2]: a value for each pair, at the positions asked for."""
    if table.shape[-1] == rotary_dim:
        table = table[..., ::2] if interleaved else table[..., : rotary_dim // 2]
    if position_ids is not None:
        table = table.reshape(-1, table.shape[-1])[position_ids]
    return (table if table.dim() == 3 else table[None])[:, None]


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x [B, N, S, H] with its first R dims turned in pairs by cos, sin [B or 1, 1, S, R/2]; float32 inside."""
    size = 2 * cos.shape[-1]
    wide = x[..., :size].to(torch.promote_types(x.dtype, torch.float32))
    a, b = (wide[..., ::2], wide[..., 1::2]) if interleaved else wide.chunk(2, -1)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    turned = (a * cos - b * sin, b * cos + a * sin)
    out = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
    return torch.cat((out.to(x.dtype), x[..., size:]), -1)


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    position_ids: torch.Tensor | None,
    interleaved: bool,
    rotary_dim: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, N, S, H] and k [B, K, S, H], rotated."""
    cos, sin = (angles(table, position_ids, interleaved, rotary_dim) for table in (cos, sin))
    return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)
