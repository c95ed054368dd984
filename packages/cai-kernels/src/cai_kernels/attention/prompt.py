"""Attention of a prompt, or of the last part of one: rows whose lengths hardly ever come again."""

from __future__ import annotations

import torch

from cai_kernels.attention.choice import why_not_flash
from cai_kernels.attention.documents import document_tail_attention
from cai_kernels.attention.function import attention
from cai_kernels.attention.last_queries import last_queries_attention
from cai_kernels.errors import KernelError


def prompt_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    scale: float | None = None,
    window: int | None = None,
) -> torch.Tensor:
    """Causal attention of the last queries of a sequence, which takes no longer for lengths that are new.

    cuDNN makes a plan for each pair of lengths, in a fifth of a second on an H200. Rows of training are of few lengths,
    each prompt is of its own: so torch's flash operator is called, which has no plans, wherever it takes the arguments.
    The result is not differentiable there.

    Args:
        query: [B, N, Sq, H], float32, bfloat16, float16 or float64; the last one is at the position of the last key.
        key: [B, Nkv, Sk, H] with Sk >= Sq, and N a multiple of Nkv.
        value: [B, Nkv, Sk, Hv]; Hv may be less than H.
        scale: factor on query @ key.T; None: 1 / sqrt(H).
        window: a query sees its own position and window - 1 before it; None: all before it.

    Returns [B, N, Sq, Hv] in query's dtype. Raises `KernelError` for more queries than keys.
    """
    queries, keys = query.shape[2], key.shape[2]
    if queries > keys:
        raise KernelError("more queries than keys", got=f"{queries} queries, {keys} keys")
    if why_not_flash(query) is None:
        return _by_flash(query, key, value, scale, window)
    if queries == keys:
        return attention(query, key, value, causal=True, scale=scale, window=window)
    if window is None:
        return last_queries_attention(query, key, value, scale=scale)
    starts = (
        torch.tensor([[0, length]] * len(query), dtype=torch.int32, device=query.device)
        for length in (keys, queries)
    )
    return document_tail_attention(query, key, value, *starts, scale=scale, window=window)


def _by_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float | None, window: int | None
) -> torch.Tensor:
    """Call torch's flash operator, which takes values as wide as keys, and puts the last query at the last key."""
    width = value.shape[-1]
    if width < query.shape[-1]:
        value = torch.nn.functional.pad(value, (0, query.shape[-1] - width))
    rows = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = torch.ops.aten._flash_attention_forward(
        *rows, None, None, query.shape[2], key.shape[2], 0.0, True, False,
        scale=query.shape[-1] ** -0.5 if scale is None else scale,
        window_size_left=None if window is None else window - 1,
        window_size_right=None if window is None else 0,
    )[0]  # fmt: skip
    return out[..., :width].transpose(1, 2)
