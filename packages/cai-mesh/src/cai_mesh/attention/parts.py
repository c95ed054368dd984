"""Attention to some keys at a time in plain torch, by the log-sum-exp of its scores: the twin of every other form."""

from __future__ import annotations

import torch

from cai_mesh.attention.masked import visible_mask
from cai_mesh.protocols import AttentionCall

Found = tuple[torch.Tensor, torch.Tensor]
"""What an attention finds, [B, N, Sq, H], and the log-sum-exp of its scores, [B, N, Sq]."""


class MaskedParts:
    """An `AttentionParts` that makes all scores, float32 or wider, under one mask.

    Parts are merged as in Liu et al., Ring Attention (arXiv:2310.01889).
    """

    def forward(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, call: AttentionCall
    ) -> Found:
        """Attend to these keys."""
        scores, _ = _scores(query, key, call)
        lse = scores.logsumexp(-1)
        weights = (scores - _finite(lse)[..., None]).exp()
        return (weights @ _of_queries(value, query, scores.dtype)).to(query.dtype), lse

    def merge(self, first: Found, second: Found) -> Found:
        """Merge the attention to two sets of keys."""
        (out, lse), (other, other_lse) = first, second
        merged = torch.logaddexp(lse, other_lse)
        shares = ((tensor - _finite(merged)).exp()[..., None] for tensor in (lse, other_lse))
        return sum(part * share for part, share in zip((out, other), shares, strict=True)), merged  # type: ignore[return-value]

    def backward(
        self,
        dout: torch.Tensor,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        call: AttentionCall,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Differentiate by query, key and value."""
        scores, slope = _scores(query, key, call)
        wide = scores.dtype
        weights = (scores - _finite(lse)[..., None]).exp()
        dout = dout.to(wide)
        keys, values = (_of_queries(tensor, query, wide) for tensor in (key, value))
        dweights = dout @ values.transpose(-1, -2)
        dscores = weights * (dweights - (dout * out).sum(-1, keepdim=True)) * slope * call.scale
        dquery = dscores @ keys
        dkey, dvalue = dscores.transpose(-1, -2) @ query.to(wide), weights.transpose(-1, -2) @ dout
        dkey, dvalue = (grad.unflatten(1, (key.shape[1], -1)).sum(2).to(key.dtype) for grad in (dkey, dvalue))
        return dquery.to(query.dtype), dkey, dvalue


def _scores(
    query: torch.Tensor, key: torch.Tensor, call: AttentionCall
) -> tuple[torch.Tensor, torch.Tensor | float]:
    """Return the scores of all pairs, -inf where nothing is seen, and the slope of the soft cap at each."""
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ _of_queries(key, query, wide).transpose(-1, -2) * call.scale
    slope: torch.Tensor | float = 1.0
    if call.softcap is not None:
        bent = torch.tanh(scores / call.softcap)
        scores, slope = call.softcap * bent, 1 - bent.square()
    mask = visible_mask(query, key, call)
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)), slope


def _of_queries(key: torch.Tensor, query: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return keys or values with a head for each head of queries."""
    return key.to(dtype).repeat_interleave(query.shape[1] // key.shape[1], 1)


def _finite(lse: torch.Tensor) -> torch.Tensor:
    """Return numbers that may be taken from scores: of a query that sees nothing, 0."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
