"""Attention in rows that hold several documents each, one after the other."""

from __future__ import annotations

import torch

from cai_kernels.attention.choice import Question, why_not_flash, why_not_ours
from cai_kernels.attention.function import attention, varlen_attention
from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError


def document_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of rows of several documents: a query sees keys of its own document alone.

    Args:
        query: [B, N, S, H], float32, bfloat16, float16 or float64, any strides.
        key, value: [B, Nkv, S, H], with N a multiple of Nkv, in q's dtype.
        cu_seqlens: [B, D + 1] int32: document d of row b is at cu_seqlens[b, d]..cu_seqlens[b, d + 1]. A row begins
            with 0 and ends with S; one of fewer documents repeats S, whose documents are empty.
        causal, scale, window, softcap, dropout: as in `attention`.
        backend: "auto" (`varlen_attention` on CUDA, for what it takes; else `attention` with a mask [B, 1, S, S]),
            "triton" or "reference".

    Returns [B, N, S, H] in q's dtype. Differentiable in query, key and value. No boundary is read on the host. Raises
    `KernelError` naming the argument that does not fit.
    """
    require("cu_seqlens", cu_seqlens, dtypes=(torch.int32,), like=query)
    if cu_seqlens.dim() != 2 or cu_seqlens.shape[0] != query.shape[0] or cu_seqlens.shape[1] < 2:
        raise KernelError(
            "cu_seqlens has a wrong shape", got=tuple(cu_seqlens.shape), expected=f"[{query.shape[0]}, D + 1]"
        )
    if key.shape[2:3] != query.shape[2:3]:
        raise KernelError("as many queries as keys", got=f"{query.shape[2]} queries, {key.shape[2]} keys")
    if _is_masked(query, value, Question(None, causal, window, softcap, dropout), backend):
        mask = document_mask(cu_seqlens, query.shape[2])
        return attention(
            query, key, value, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap, dropout=dropout,
            backend="reference" if backend == "reference" else "auto",
        )  # fmt: skip
    rows, _, length, _ = query.shape
    first = torch.arange(0, rows * length, length, dtype=torch.int32, device=query.device)
    starts = (cu_seqlens + first[:, None]).flatten()
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    if softcap is not None:
        out = _capped(*flat, starts, length, softcap, causal=causal, scale=scale, window=window)
    else:
        out = varlen_attention(
            *flat, starts, max_seqlen=length, causal=causal, scale=scale, window=window, backend=backend
        )
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: torch.Tensor,
    longest: int,
    softcap: float,
    *,
    causal: bool,
    scale: float | None,
    window: int | None,
) -> torch.Tensor:
    """`varlen_attention` with a soft cap, which torch's flash operator lacks."""
    from cai_kernels.attention import triton

    options = triton.Options(
        query.shape[-1] ** -0.5 if scale is None else scale, causal, window or 0, softcap, longest, longest
    )
    heads_first = (tensor.transpose(0, 1) for tensor in (query, key, value))
    out, _ = triton.attention(*heads_first, options, query_starts=starts, key_starts=starts)
    return out.transpose(0, 1)


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(
        cu_seqlens, places.expand(cu_seqlens.shape[0], length).contiguous(), right=True
    )
    return (document[:, :, None] == document[:, None, :])[:, None]


def _is_masked(query: torch.Tensor, value: torch.Tensor, question: Question, backend: Backend) -> bool:
    """Whether no packed form takes the arguments, and all scores are made under a mask."""
    if choose(backend, query.device) == "reference":
        return True
    flash = why_not_flash(query) is None and question.softcap is None and value.shape[-1] == query.shape[-1]
    packed = not question.dropout and (flash or why_not_ours(query, value, question) is None)
    if backend == "triton" and not packed:
        raise KernelError(
            'the "triton" attention cannot run here',
            got=why_not_ours(query, value, question),
            fix='use backend="auto"',
        )
    return not packed
