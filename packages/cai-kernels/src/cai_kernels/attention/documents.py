"""Attention in rows that hold several documents each, one after the other."""

from __future__ import annotations

import torch

from cai_kernels.attention.boundaries import check_starts, document_mask, last_queries_mask, packed_starts
from cai_kernels.attention.choice import Question, why_not_flash, why_not_ours
from cai_kernels.attention.function import attention, varlen_attention
from cai_kernels.backend import Backend, choose
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
        key: [B, Nkv, S, H], with N a multiple of Nkv, in q's dtype.
        value: [B, Nkv, S, Hv]; Hv may be less than H.
        cu_seqlens: [B, D + 1] int32: document d of row b is at cu_seqlens[b, d]..cu_seqlens[b, d + 1]. A row begins
            with 0 and ends with S; one of fewer documents repeats S, whose documents are empty.
        causal, scale, window, softcap, dropout: as in `attention`.
        backend: "auto" (`varlen_attention` on CUDA, for what it takes; else `attention` with a mask [B, 1, S, S]),
            "triton" or "reference".

    Returns [B, N, S, Hv] in q's dtype. Differentiable in query, key and value. No boundary is read on the host. Raises
    `KernelError` naming the argument that does not fit.
    """
    check_starts(query, key, cu_seqlens, None)
    question = Question(None, causal, window, softcap, dropout)
    return _attend(query, key, value, (cu_seqlens, None), question, scale, backend)


def document_tail_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    query_cu_seqlens: torch.Tensor,
    *,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of rows of several documents whose queries are the last ones of each, as those of some rank.

    Args:
        query: [B, N, Sq, H].
        key, value, cu_seqlens: as in `document_attention`.
        query_cu_seqlens: [B, D + 1] int32: where the queries of each document begin, at whose last keys they are; a row
            ends with Sq.
        causal, scale, window, softcap, backend: as in `document_attention`.

    Returns [B, N, Sq, Hv] in q's dtype; the rest as there.
    """
    check_starts(query, key, cu_seqlens, query_cu_seqlens)
    question = Question(None, causal, window, softcap)
    return _attend(query, key, value, (cu_seqlens, query_cu_seqlens), question, scale, backend)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor | None],
    question: Question,
    scale: float | None,
    backend: Backend,
) -> torch.Tensor:
    """Attend by a packed form or under a mask; boundaries are those of keys, and of queries where they are others."""
    missing = query.shape[-1] - value.shape[-1]
    if missing > 0 and choose(backend, query.device) != "reference":  # packed forms take equal ones
        wide = torch.nn.functional.pad(value, (0, missing))
        return _attend(query, key, wide, boundaries, question, scale, backend)[..., : value.shape[-1]]
    if _is_masked(query, value, question, backend):
        return _under_mask(query, key, value, boundaries, question, scale, backend)
    causal, window = question.causal, question.window
    key_starts = packed_starts(boundaries[0], key.shape[2])
    query_starts = None if boundaries[1] is None else packed_starts(boundaries[1], query.shape[2])
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    longest = max(query.shape[2], key.shape[2])
    if question.softcap is not None:
        starts = key_starts if query_starts is None else query_starts, key_starts
        out = _capped(*flat, starts, longest, question.softcap, causal=causal, scale=scale, window=window)
    else:
        starts = (key_starts, None) if query_starts is None else (query_starts, key_starts)
        options = {"max_seqlen": longest, "causal": causal, "scale": scale, "window": window}
        out = varlen_attention(*flat, *starts, backend=backend, **options)
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _under_mask(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: tuple[torch.Tensor, torch.Tensor | None],
    question: Question,
    scale: float | None,
    backend: Backend,
) -> torch.Tensor:
    options = {"scale": scale, "softcap": question.softcap, "dropout": question.dropout}
    form = "reference" if backend == "reference" else "auto"
    shape = {"causal": question.causal, "window": question.window}
    key_starts, query_starts = boundaries
    if query_starts is None:
        mask = document_mask(key_starts, query.shape[2])
        return attention(query, key, value, mask=mask, backend=form, **shape, **options)
    mask = last_queries_mask(query_starts, key_starts, query.shape[2], key.shape[2], **shape)
    return attention(query, key, value, mask=mask, backend=form, **options)


def _capped(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    starts: tuple[torch.Tensor, torch.Tensor],
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
    out, _ = triton.attention(*heads_first, options, query_starts=starts[0], key_starts=starts[1])
    return out.transpose(0, 1)


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
