"""A loop's batches, their embedding rows on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch

from cai_mesh.errors import PlanError

Batch = TypeVar("Batch")


class Prefetches(Protocol):
    """The method that `lookahead` needs of an embedding."""

    def prefetch(self, ids: torch.Tensor, offsets: torch.Tensor | None = None) -> bool: ...


def lookahead(
    batches: Iterable[Batch],
    embeddings: Sequence[Prefetches],
    ids: Callable[[Batch], Sequence[torch.Tensor | tuple[torch.Tensor, torch.Tensor]]],
    *,
    depth: int = 1,
) -> Iterator[Batch]:
    """Yield the batches in order, having asked the embeddings for the rows of the `depth` batches after each.

    The rows of a batch are thus fetched while those before it compute. Each embedding's cache must hold the rows of
    `depth` + 1 batches; where it does not, a prefetch does nothing and the forward fetches. Pass the forward the very
    tensors that `ids` returns.

    Args:
        batches: a data loader, or any iterable.
        embeddings: `CachedEmbedding`s or `ShardedEmbedding`s.
        ids: the ids in a batch for each embedding, in their order; with bags of unequal length (ids, offsets).
        depth: batches to be ahead by, at least 1.

    Raises `PlanError` when `depth` is less than 1 or `ids` gives another number of tensors than there are embeddings.
    """
    if depth < 1:
        raise PlanError("lookahead needs a depth", got=depth, expected="at least 1")
    return _ahead(batches, embeddings, ids, depth)


def _ahead(batches, embeddings, ids, depth):
    waiting: deque = deque()
    for batch in batches:
        lookups = ids(batch)
        if len(lookups) != len(embeddings):
            raise PlanError(
                "lookahead: ids of another number of embeddings", got=len(lookups), expected=len(embeddings)
            )
        for embedding, lookup in zip(embeddings, lookups, strict=True):
            embedding.prefetch(*(lookup if isinstance(lookup, tuple) else (lookup,)))
        waiting.append(batch)
        if len(waiting) > depth:
            yield waiting.popleft()
    yield from waiting
