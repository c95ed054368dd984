"""Which tokens travel to which ranks: plain tensors, and nothing that talks.

A token travels once to each rank that has some of the experts it visits, however many of them those are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """One rank's part of a layer's experts.

    Args:
        first, last: the experts first..last-1.
    """

    first: int
    last: int


def parts_of(experts: int, ranks: int, copies: int = 1) -> list[Part]:
    """Return the part of each rank: equal ones, one after the other.

    Args:
        experts: a multiple of `ranks`.
        copies: the number of ranks, one after the other, that share each part: each has some features of it.
    """
    size = experts // ranks
    return [Part(i * size, (i + 1) * size) for i in range(ranks) for _ in range(copies)]


@dataclass(frozen=True)
class Rows:
    """The rows that this rank sends, in the order of the ranks that they go to.

    Args:
        tokens: the number of the token in each row, int64 [S]; those for one rank are in order.
        ids: the experts each visits there, as its part counts them from 0; -1 for experts of others, int64 [S, K].
        counts: the number of rows for each rank, int64 [ranks], on the device.
    """

    tokens: Tensor
    ids: Tensor
    counts: Tensor


def rows_of(ids: Tensor, parts: list[Part], among: tuple[int, int] | None = None) -> Rows:
    """Return the rows that travel.

    The host waits for their number.

    Args:
        ids: the experts that tokens visit, int64 [T, K]; an id that no part has travels nowhere.
        parts: the part of each rank.
        among: tokens from the first to before the last of these travel; None: all.
    """
    bounds = torch.tensor([(part.first, part.last) for part in parts], device=ids.device)
    first, last = bounds[:, 0], bounds[:, 1]
    visits = ((ids >= first[:, None, None]) & (ids < last[:, None, None])).any(-1)
    if among is not None:
        visits[:, : among[0]] = False
        visits[:, among[1] :] = False
    rank, tokens = visits.nonzero(as_tuple=True)
    chosen, first, last = ids[tokens], first[rank, None], last[rank, None]
    own = (chosen >= first) & (chosen < last)
    return Rows(tokens, torch.where(own, chosen - first, -1), visits.sum(1))


def share_of(tokens: int, index: int, ranks: int) -> tuple[int, int]:
    """Return the first and the last, not included, of the tokens that rank `index` of `ranks` copies of them takes."""
    return tokens * index // ranks, tokens * (index + 1) // ranks
