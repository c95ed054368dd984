"""Causal attention of the last queries of a sequence: some rank's, to the keys of all ranks before it."""

from __future__ import annotations

import torch

from cai_kernels.attention.partial import attention_backward, attention_with_lse, merge_attention
from cai_kernels.errors import KernelError
from cai_kernels.ops import define


def last_queries_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, scale: float | None = None
) -> torch.Tensor:
    """Causal attention of fewer queries than keys, of which the last is at the position of the last key.

    torch's fastest operators take causal attention where queries and keys are as many, and stand side by side from the
    first: so all queries see the keys before them in one part, and each other in another.

    Args:
        query: [B, N, Sq, H], in dtypes of `attention_with_lse`.
        key, value: [B, Nkv, Sk, H] with Sk > Sq.
        scale: factor on query @ key.T; None: 1 / sqrt(H).

    Returns [B, N, Sq, Hv] in q's dtype. Differentiable in query, key and value. Raises `KernelError` naming what does
    not fit.
    """
    if not query.dim() == key.dim() == 4 or key.shape[2] <= query.shape[2]:
        raise KernelError(
            "fewer queries than keys", got=f"query {tuple(query.shape)}, key {tuple(key.shape)}"
        )
    return _operator(query, key, value, query.shape[-1] ** -0.5 if scale is None else scale)[0]


def _parts(tensor: torch.Tensor, queries: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys before the queries, and those of the queries."""
    before = tensor.shape[2] - queries
    return tensor[:, :, :before], tensor[:, :, before:]


def _last_queries_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    keys, values = (_parts(tensor, query.shape[2]) for tensor in (key, value))
    before = attention_with_lse(query, keys[0], values[0], scale=scale)
    of_queries = attention_with_lse(query, keys[1], values[1], scale=scale, causal=True)
    out, lse = merge_attention(*before, *of_queries, dtype=query.dtype)
    return out.contiguous(), lse.contiguous()  # graphs expect the strides of `_empty`


def _last_queries_attention_backward(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    keys, values = (_parts(tensor, query.shape[2]) for tensor in (key, value))
    dq, dk, dv = attention_backward(dout, query, keys[0], values[0], out, lse, scale=scale)
    of_queries = attention_backward(dout, query, keys[1], values[1], out, lse, scale=scale, causal=True)
    total = torch.empty_like(dq, memory_format=torch.contiguous_format)
    torch.add(dq, of_queries[0], out=total)
    return total, torch.cat([dk, of_queries[1]], 2), torch.cat([dv, of_queries[2]], 2)


def _empty(query, key, value, scale):
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(*query.shape[:-1], value.shape[-1]), query.new_empty(query.shape[:-1], dtype=wide)


def _empty_gradients(dout, query, key, value, out, lse, scale):
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)
    )


def _save(ctx, inputs, output) -> None:
    query, key, value, ctx.scale = inputs
    ctx.save_for_backward(query, key, value, *output)
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
