"""Gated attention with a pair bias (Jumper et al., 10.1038/s41586-021-03819-2, algorithms 7, 13, 14), plainly."""

from __future__ import annotations

import torch

from cai_kernels.attention.reference import softmax_lse


def pair_bias_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    pair_bias: torch.Tensor | None,
    mask: torch.Tensor | None,
    gate: torch.Tensor | None,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q, k, v, gate [B, R, N, S, H], pair_bias [B, N, S, S], mask [B, R, S] -> (out like q, lse [B, R, N, S]).

    Scores are float32 (float64 stays). A query for which every key is masked by -inf gives zeros.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scores = q.to(wide) @ k.to(wide).transpose(-1, -2) * scale
    if pair_bias is not None:
        scores = scores + pair_bias.to(wide)[:, None]
    if mask is not None:
        scores = scores + mask.to(wide)[:, :, None, None, :]
    weights, lse = softmax_lse(scores)
    out = weights @ v.to(wide)
    if gate is not None:
        out = out * torch.sigmoid(gate.to(wide))
    return out.to(q.dtype), lse
