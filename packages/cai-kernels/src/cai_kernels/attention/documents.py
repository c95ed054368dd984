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
    query_cu_seqlens: torch.Tensor | None = None,
    causal: bool = True,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Attention of rows of several documents: a query sees keys of its own document alone.

    Args:
        query: [B, N, Sq, H], float32, bfloat16, float16 or float64, any strides.
        key, value: [B, Nkv, S, H], with N a multiple of Nkv, in q's dtype.
        cu_seqlens: [B, D + 1] int32: document d of row b is at cu_seqlens[b, d]..cu_seqlens[b, d + 1]. A row begins
            with 0 and ends with S; one of fewer documents repeats S, whose documents are empty.
        query_cu_seqlens: [B, D + 1] int32: the same of queries, whose rows end with Sq; those of a document are at its
            last keys. None: as many queries as keys.
        causal, scale, window, softcap, dropout: as in `attention`.
        backend: "auto" (`varlen_attention` on CUDA, for what it takes; else `attention` with a mask [B, 1, Sq, S]),
            "triton" or "reference".

    Returns [B, N, Sq, H] in q's dtype. Differentiable in query, key and value. No boundary is read on the host. Raises
    `KernelError` naming the argument that does not fit.
    """
    _check_starts(query, key, cu_seqlens, query_cu_seqlens)
    if _is_masked(query, value, Question(None, causal, window, softcap, dropout), backend):
        options: dict = {"scale": scale, "softcap": softcap, "dropout": dropout}
        options["backend"] = "reference" if backend == "reference" else "auto"
        if query_cu_seqlens is None:
            mask = document_mask(cu_seqlens, query.shape[2])
            return attention(query, key, value, mask=mask, causal=causal, window=window, **options)
        lengths = query.shape[2], key.shape[2]
        mask = _last_queries_mask(query_cu_seqlens, cu_seqlens, *lengths, causal=causal, window=window)
        return attention(query, key, value, mask=mask, **options)
    key_starts = _packed_starts(cu_seqlens, key.shape[2])
    query_starts = None if query_cu_seqlens is None else _packed_starts(query_cu_seqlens, query.shape[2])
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    longest = max(query.shape[2], key.shape[2])
    if softcap is not None:
        starts = key_starts if query_starts is None else query_starts, key_starts
        out = _capped(*flat, starts, longest, softcap, causal=causal, scale=scale, window=window)
    else:
        starts = (key_starts, None) if query_starts is None else (query_starts, key_starts)
        out = varlen_attention(
            *flat, *starts, max_seqlen=longest, causal=causal, scale=scale, window=window, backend=backend
        )
    return out.unflatten(0, (query.shape[0], query.shape[2])).transpose(1, 2)


def _check_starts(
    query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor, query_cu_seqlens: torch.Tensor | None
) -> None:
    """Raise `KernelError` where boundaries do not fit queries and keys."""
    given = {"cu_seqlens": cu_seqlens}
    if query_cu_seqlens is not None:
        given["query_cu_seqlens"] = query_cu_seqlens
    for name, starts in given.items():
        require(name, starts, dtypes=(torch.int32,), like=query)
        if starts.dim() != 2 or starts.shape[0] != query.shape[0] or starts.shape[1] < 2:
            raise KernelError(
                f"{name} has a wrong shape", got=tuple(starts.shape), expected=f"[{query.shape[0]}, D + 1]"
            )
        if starts.shape != cu_seqlens.shape:
            raise KernelError(
                "queries and keys are of the same documents",
                got=f"{name} {tuple(starts.shape)}, cu_seqlens {tuple(cu_seqlens.shape)}",
            )
    if query_cu_seqlens is None and key.shape[2:3] != query.shape[2:3]:
        raise KernelError(
            "as many queries as keys",
            got=f"{query.shape[2]} queries, {key.shape[2]} keys",
            fix="say by query_cu_seqlens which they are",
        )


def _packed_starts(starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return the boundaries of all rows, one after the other: [B, D + 1] -> [B (D + 1)]."""
    first = torch.arange(0, len(starts) * length, length, dtype=torch.int32, device=starts.device)
    return (starts + first[:, None]).flatten()


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


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(
        cu_seqlens, places.expand(cu_seqlens.shape[0], length).contiguous(), right=True
    )
    return (document[:, :, None] == document[:, None, :])[:, None]


def _last_queries_mask(
    query_starts: torch.Tensor,
    key_starts: torch.Tensor,
    queries: int,
    keys: int,
    *,
    causal: bool,
    window: int | None,
) -> torch.Tensor:
    """bool [B, 1, queries, keys]: who sees whom where the queries of a document are at its last keys."""
    documents, places = [], []
    for starts, length in ((query_starts, queries), (key_starts, keys)):
        tokens = torch.arange(length, dtype=starts.dtype, device=starts.device).expand(len(starts), length)
        document = torch.searchsorted(starts, tokens.contiguous(), right=True)
        documents.append(document)
        places.append(tokens - starts.gather(1, document))  # from the document's end, where both meet
    distance = places[0][:, :, None] - places[1][:, None]
    visible_mask = documents[0][:, :, None] == documents[1][:, None]
    if causal:
        visible_mask = visible_mask & (distance >= 0)
    if window is not None:
        visible_mask = visible_mask & (distance.abs() < window)
    return visible_mask[:, None]


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
