"""Causal attention of the last queries of a sequence: some rank's, to the keys of all ranks before it."""

from __future__ import annotations

import torch

from cai_kernels.attention.partial import attention_backward, attention_with_lse, merge_attention
from cai_kernels.errors import KernelError
from cai_kernels.ops import define


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
    return _operator(q, k, v, q.shape[-1] ** -0.5 if scale is None else scale)[0]


def _parts(tensor: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys before the queries, and those of the queries."""
    before = tensor.shape[2] - queries
    return tensor[:, :, :before], tensor[:, :, before:]


def _last_queries_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (_parts(tensor, q.shape[2]) for tensor in (k, v))
    before = attention_with_lse(q, keys[0], values[0], scale=scale)
    own = attention_with_lse(q, keys[1], values[1], scale=scale, causal=True)
    return merge_attention(*before, *own, dtype=q.dtype)


def _last_queries_attention_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, values = (_parts(tensor, q.shape[2]) for tensor in (k, v))
    dq, dk, dv = attention_backward(dout, q, keys[0], values[0], out, lse, scale=scale)
    own = attention_backward(dout, q, keys[1], values[1], out, lse, scale=scale, causal=True)
    return dq + own[0], torch.cat([dk, own[1]], 2), torch.cat([dv, own[2]], 2)


def _empty(q, k, v, scale):
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(q.shape[:-1], dtype=wide)


def _empty_gradients(dout, q, k, v, out, lse, scale):
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (q, k, v))


def _save(ctx, inputs, output) -> None:
    q, k, v, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx, dout, _dlse):
    return *_backward(dout, *ctx.saved_tensors, ctx.scale), None


_backward = define(_last_queries_attention_backward, _empty_gradients)
_operator = define(
    _last_queries_attention,
    _empty,
    save=_save,
    backward=_differentiate,
    otherwise="take `attention` with a mask",
)
