"""Attention in plain torch: scores, mask, softmax, sum."""

from __future__ import annotations

import itertools

import torch


def softmax_lse(scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(softmax, log-sum-exp) over the last dim; zeros and -inf where every score is -inf, with finite gradients."""
    largest = (
        scores.detach().amax(-1, keepdim=True)
        if scores.shape[-1]
        else scores.new_zeros(*scores.shape[:-1], 1)
    )
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    weights = torch.exp(scores - largest)
    total = weights.sum(-1, keepdim=True)
    empty = total == 0
    total = torch.where(empty, 1.0, total)
    lse = torch.where(empty, -torch.inf, largest + total.log())
    return weights / total, lse.squeeze(-1)


def visible(
    queries: int, keys: int, *, causal: bool, window: int | None, device: torch.device
) -> torch.Tensor | None:
    """[queries, keys] bool, or None when all is seen. The last query has the position of the last key.

    window: a query sees its own position and window - 1 before it (and as many after it, unless causal).
    """
    if not causal and window is None:
        return None
    row = torch.arange(queries, device=device)[:, None] + (keys - queries)
    column = torch.arange(keys, device=device)[None, :]
    visible_mask = column <= row if causal else torch.ones(queries, keys, dtype=torch.bool, device=device)
    if window is not None:
        visible_mask = visible_mask & (column > row - window) & (column < row + window)
    return visible_mask


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    causal: bool = False,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [B, N, Sq, H], k and v [B, Nkv, Sk, H], mask [.., Sq, Sk] -> (out like q, lse [B, N, Sq]).

    Scores are float32 (float64 stays). A query that sees no key gives zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[-3] // k.shape[-3]
    k, v = (t.to(wide).repeat_interleave(group, -3) for t in (k, v))
    scores = q.to(wide) @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.to(wide)
    visible_mask = visible(q.shape[-2], k.shape[-2], causal=causal, window=window, device=q.device)
    if visible_mask is not None:
        scores = scores.masked_fill(~visible_mask, -torch.inf)
    weights, lse = softmax_lse(scores)
    weights = torch.nn.functional.dropout(weights, dropout) if dropout else weights
    return (weights @ v).to(q.dtype), lse


def varlen_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
) -> torch.Tensor:
    """q [T, N, H], k and v [Tk, Nkv, H] -> [T, N, H]: one attention a sequence. The host waits for the starts."""
    pieces = []
    for (first, end), (key_first, key_end) in zip(
        *(itertools.pairwise(s.tolist()) for s in starts), strict=True
    ):
        one = (t.transpose(0, 1) for t in (q[first:end], k[key_first:key_end], v[key_first:key_end]))
        pieces.append(attention(*one, scale=scale, causal=causal, window=window)[0].transpose(0, 1))
    return torch.cat([*pieces, q.new_zeros(q.shape[0] - sum(len(p) for p in pieces), *q.shape[1:])])
