"""The query heads that a rank has of an attention, and the key/value heads that these need."""

from __future__ import annotations

import math


def own_heads(heads: int, degree: int, rank: int) -> range:
    """The query heads of a rank: runs of one length, the last one shorter where that does not divide."""
    per_rank = -(-heads // degree)
    return range(min(rank * per_rank, heads), min((rank + 1) * per_rank, heads))


def picked_heads(queries: int, shared: int, degree: int, rank: int) -> tuple[int, ...]:
    """The key/value heads of a rank's query heads, each for `queries_per_pick` query heads in turn.

    Args:
        queries: query heads, a multiple of `shared`.
        shared: key/value heads.
        degree, rank: ranks, and this one.
    """
    per_pick = queries_per_pick(queries, shared, degree)
    return tuple(first * shared // queries for first in own_heads(queries, degree, rank)[::per_pick])


def queries_per_pick(queries: int, shared: int, degree: int) -> int:
    """The number of query heads that use each of `picked_heads`, on every rank."""
    lengths = {len(own_heads(queries, degree, rank)) for rank in range(degree)}
    return math.gcd(queries // shared, *lengths)


def has_heads_for(heads: int, degree: int) -> bool:
    """Whether each rank gets a head."""
    return len(own_heads(heads, degree, degree - 1)) > 0
