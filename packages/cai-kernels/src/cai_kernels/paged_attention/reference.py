"""Attention over a paged cache (Kwon et al., arXiv:2309.06180) in plain torch."""

from __future__ import annotations

import torch

from cai_kernels.attention.reference import softmax_lse


def append(cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
    """Write rows [T, N, H] into cache [blocks, block_size, N, H] at slots [T]; negative slots are left out."""
    slot_mask = slots >= 0
    cache.view(-1, *cache.shape[2:])[slots[slot_mask].long()] = rows[slot_mask].to(cache.dtype)


def attention(
    q: torch.Tensor,
    caches: tuple[torch.Tensor, torch.Tensor],
    block_tables: torch.Tensor,
    lengths: torch.Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [T, N, H], one query a row, with its blocks in block_tables [T, most], and how many keys it sees [T]."""
    size, key_heads = caches[0].shape[1:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    at = torch.arange(block_tables.shape[1] * size, device=q.device)
    visible_mask = at[None, :] < lengths[:, None]
    if window is not None:
        visible_mask &= at[None, :] >= lengths[:, None] - window
    blocks = block_tables[:, at // size].long()
    slots = torch.where(visible_mask, blocks * size + at % size, 0)
    rows = (cache.view(-1, *cache.shape[2:])[slots].to(wide) for cache in caches)
    k, v = (torch.where(visible_mask[..., None, None], row, 0.0).transpose(1, 2) for row in rows)
    grouped = q.to(wide).unflatten(1, (key_heads, -1))
    scores = grouped @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible_mask[:, None, None], -torch.inf)
    if sinks is not None:  # a key without a value
        sink = sinks.to(wide).reshape(1, key_heads, -1, 1).expand(len(q), -1, -1, 1)
        scores = torch.cat([scores, sink], -1)
    weights = softmax_lse(scores)[0][..., : len(at)]
    return (weights @ v).flatten(1, 2).to(q.dtype)
