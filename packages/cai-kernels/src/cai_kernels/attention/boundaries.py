"""Where documents of rows begin: checks, packed boundaries, and masks of who sees whom."""

from __future__ import annotations

import torch

from cai_kernels.backend import require
from cai_kernels.errors import KernelError


def check_starts(
    query: torch.Tensor, key: torch.Tensor, cu_seqlens: torch.Tensor, query_cu_seqlens: torch.Tensor | None
) -> None:
    """Raise `KernelError` where boundaries do not fit queries and keys."""
    boundaries = {"cu_seqlens": cu_seqlens}
    if query_cu_seqlens is not None:
        boundaries["query_cu_seqlens"] = query_cu_seqlens
    for name, starts in boundaries.items():
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


def packed_starts(starts: torch.Tensor, length: int) -> torch.Tensor:
    """Return the boundaries of all rows, one after the other: [B, D + 1] -> [B (D + 1)]."""
    first = torch.arange(0, len(starts) * length, length, dtype=torch.int32, device=starts.device)
    return (starts + first[:, None]).flatten()


def document_mask(cu_seqlens: torch.Tensor, length: int) -> torch.Tensor:
    """[B, D + 1] -> bool [B, 1, length, length]: True where two positions are of one document."""
    places = torch.arange(length, dtype=cu_seqlens.dtype, device=cu_seqlens.device)
    document = torch.searchsorted(
        cu_seqlens, places.expand(cu_seqlens.shape[0], length).contiguous(), right=True
    )
    return (document[:, :, None] == document[:, None, :])[:, None]


def last_queries_mask(
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
