"""Causal attention of the last queries of a sequence: some rank's, to the keys of all ranks before it."""

from __future__ import annotations

import torch

from cai_kernels.attention.partial import attention_backward, attention_with_lse, merge_attention
from cai_kernels.errors import KernelError


def last_queries_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Causal attention of fewer queries than keys, of which the last is at the position of the last key.

    torch's fastest operators take causal attention where queries and keys are as many, and stand side by side from the
    first: so all queries see the keys before them in one part, and each other in another.

    Args:
        q: [B, N, Sq, H], in dtypes of `attention_with_lse`.
        k, v: [B, Nkv, Sk, H] with Sk > Sq.
        scale: factor on q @ k.T; None: 1 / sqrt(H).

    Returns [B, N, Sq, H] in q's dtype. Differentiable in q, k and v. Raises `KernelError` naming what does not fit.
    """
    if not q.dim() == k.dim() == 4 or k.shape[2] <= q.shape[2]:
        raise KernelError("fewer queries than keys", got=f"q {tuple(q.shape)}, k {tuple(k.shape)}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    out = _LastQueries.apply(q, k, v, scale)
    assert isinstance(out, torch.Tensor)
    return out


def _parts(tensor: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys before the queries, and those of the queries."""
    before = tensor.shape[2] - queries
    return tensor[:, :, :before], tensor[:, :, before:]


class _LastQueries(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, scale):
        keys, values = (_parts(tensor, q.shape[2]) for tensor in (k, v))
        before = attention_with_lse(q, keys[0], values[0], scale=scale)
        own = attention_with_lse(q, keys[1], values[1], scale=scale, causal=True)
        out, lse = merge_attention(*before, *own, dtype=q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        keys, values = (_parts(tensor, q.shape[2]) for tensor in (k, v))
        dq, dk, dv = attention_backward(dout, q, keys[0], values[0], out, lse, scale=ctx.scale)
        own = attention_backward(dout, q, keys[1], values[1], out, lse, scale=ctx.scale, causal=True)
        return dq + own[0], torch.cat([dk, own[1]], 2), torch.cat([dv, own[2]], 2), None
