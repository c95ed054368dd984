"""Attention with sinks: of each head a score without a value, which takes its part of every softmax.

As in gpt-oss and StreamingLLM's learned form (Xiao et al., arXiv:2309.17453): out = sum_j exp(s_j - L) v_j with
L = log(exp(sink) + sum_j exp(s_j)). It is attention to a part of the keys, the sink being the other part: what is found
with the keys alone is scaled, and backward asks for gradients under L.
"""

from __future__ import annotations

from typing import Any

import torch

from cai_kernels.attention.partial import attention_backward, attention_with_lse
from cai_kernels.backend import Backend
from cai_kernels.errors import KernelError


def sink_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    cu_seqlens: torch.Tensor | None = None,
    query_cu_seqlens: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention whose softmax has one more score, of no value, at every query.

    Args:
        query: [B, N, Sq, H], in dtypes of `attention_with_lse`.
        key, value: [B, Nkv, Sk, H].
        sinks: [N], any floating dtype: the score of each head.
        causal, scale, window, cu_seqlens, query_cu_seqlens, backend: as in `attention_with_lse`.

    Returns [B, N, Sq, Hv] in q's dtype. Differentiable in query, key, value and sinks. Raises `KernelError` naming what
    does not fit.
    """
    if sinks.shape != query.shape[1:2]:
        raise KernelError("one sink a head", got=tuple(sinks.shape), expected=f"({query.shape[1]},)")
    options = {"causal": causal, "scale": scale, "window": window, "backend": backend}
    options |= {"cu_seqlens": cu_seqlens, "query_cu_seqlens": query_cu_seqlens}
    out = _SinkAttention.apply(query, key, value, sinks, options)
    assert isinstance(out, torch.Tensor)
    return out


def with_sinks(
    out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what attention to the keys alone finds, and its log-sum-exp, with sinks.

    Args:
        out: [B, N, Sq, H].
        lse: [B, N, Sq].
        sinks: [N].
    """
    with_sink = torch.logaddexp(lse, sinks.to(lse.dtype)[:, None].expand_as(lse))
    return (out * (lse - with_sink).exp()[..., None]).to(out.dtype), with_sink


def sinks_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of sinks, [N], from that of the attention with them.

    Args:
        dout, out: [B, N, Sq, H]: the gradient of the attention with sinks, and its value.
        lse: [B, N, Sq]: its log-sum-exp.
        sinks: [N].
    """
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    product = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(share * product).sum((0, 2)).to(sinks.dtype)


class _SinkAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, options: dict[str, Any]):
        out, lse = with_sinks(*attention_with_lse(query, key, value, **options), sinks)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, dout):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        gradients = attention_backward(dout, query, key, value, out, lse, **ctx.options)
        return *gradients, sinks_gradient(dout, out, lse, sinks), None
