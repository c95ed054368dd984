"""Attention in rows that hold several documents each, one after the other."""

from __future__ import annotations

import torch

from cai_kernels.attention.choice import Question, why_not_flash, why_not_ours
from cai_kernels.attention.function import attention, varlen_attention
from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError


def document_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
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
        q: [B, N, S, H], float32, bfloat16, float16 or float64, any strides.
        k, v: [B, Nkv, S, H], with N a multiple of Nkv, in q's dtype.
        cu_seqlens: [B, D + 1] int32: document d of row b is at cu_seqlens[b, d]..cu_seqlens[b, d + 1]. A row begins
            with 0 and ends with S; one of fewer documents repeats S, whose documents are empty.
        causal, scale, window, softcap, dropout: as in `attention`.
        backend: "auto" (`varlen_attention` on CUDA, for what it takes; else `attention` with a mask [B, 1, S, S]),
            "triton" or "reference".

    Returns [B, N, S, H] in q's dtype. Differentiable in q, k and v. No boundary is read on the host. Raises
    `KernelError` naming the argument that does not fit.
    """
    require("cu_seqlens", cu_seqlens, dtypes=(torch.int32,), like=q)
    if cu_seqlens.dim() != 2 or cu_seqlens.shape[0] != q.shape[0] or cu_seqlens.shape[1] < 2:
        raise KernelError(
            "cu_seqlens has a wrong shape", got=tuple(cu_seqlens.shape), expected=f"[{q.shape[0]}, D + 1]"
        )
    if k.shape[2:3] != q.shape[2:3]:
        raise KernelError("as many queries as keys", got=f"{q.shape[2]} queries, {k.shape[2]} keys")
    if _is_masked(q, v, Question(None, causal, window, softcap, dropout), backend):
        mask = document_mask(cu_seqlens, q.shape[2])
        return attention(
            q, k, v, mask=mask, causal=causal, scale=scale, window=window, softcap=softcap, dropout=dropout,
            backend="reference" if backend == "reference" else "auto",
        )  # fmt: skip
    rows, _, length, _ = q.shape
    first = torch.arange(0, rows * length, length, dtype=torch.int32, device=q.device)
    starts = (cu_seqlens + first[:, None]).flatten()
    flat = (tensor.transpose(1, 2).flatten(0, 1) for tensor in (q, k, v))
    out = varlen_attention(
        *flat, starts, max_seqlen=length, causal=causal, scale=scale, window=window, softcap=softcap,
        backend=backend,
    )  # fmt: skip
    return out.unflatten(0, (rows, length)).transpose(1, 2)


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(
        cu_seqlens, places.expand(cu_seqlens.shape[0], length).contiguous(), right=True
    )
    return (document[:, :, None] == document[:, None, :])[:, None]


def _is_masked(q: torch.Tensor, v: torch.Tensor, question: Question, backend: Backend) -> bool:
    """Whether no packed form takes the arguments, and all scores are made under a mask."""
    if choose(backend, q.device) == "reference":
        return True
    flash = why_not_flash(q) is None and question.softcap is None and v.shape[-1] == q.shape[-1]
    packed = not question.dropout and (flash or why_not_ours(q, v, question) is None)
    if backend == "triton" and not packed:
        raise KernelError(
            'the "triton" attention cannot run here',
            got=why_not_ours(q, v, question),
            fix='use backend="auto"',
        )
    return not packed
