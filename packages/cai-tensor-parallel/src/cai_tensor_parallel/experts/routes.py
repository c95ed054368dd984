"""Which tokens travel to which ranks: plain tensors, and nothing that talks.

A token travels once to each rank that has some of the experts it visits, however many of them those are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._guards import detect_fake_mode


@dataclass(frozen=True)
class Part:
    """One rank's part of a layer's experts.

    Args:
        first, last: the experts first..last-1.
    """

    first: int
    last: int


def parts_of(experts: int, ranks: int) -> list[Part]:
    """Return the part of each rank: equal ones, one after the other; `experts` is a multiple of `ranks`."""
    size = experts // ranks
    return [Part(first, first + size) for first in range(0, experts, size)]


@dataclass(frozen=True)
class Rows:
    """The rows that this rank sends, in the order of the ranks that they go to.

    Args:
        tokens: the number of the token in each row, int64 [S]; those for one rank are in order.
        ids: the experts each visits there, as its part counts them from 0; -1 for experts of others, int64 [S, K].
        counts: the number of rows for each rank, int64 [ranks], on the device.
        visits: the number of visits there, which are ids but -1, int64 [ranks], on the device.
    """

    tokens: Tensor
    ids: Tensor
    counts: Tensor
    visits: Tensor

    def weights(self, weights: Tensor) -> Tensor:
        """Return the weights of each row's choices, [S, K], from those of all tokens, [T, K]."""
        return weights[self.tokens][:, : self.ids.shape[1]]


def rows_of(ids: Tensor, parts: list[Part], among: tuple[int, int] | None = None) -> Rows:
    """Return the rows that travel.

    The host waits for their number.

    Args:
        ids: the experts that tokens visit, int64 [T, K]; an id that no part has travels nowhere.
        parts: the part of each rank.
        among: tokens from the first to before the last of these travel; None: all.
    """
    if not has_values(ids):
        return _balanced(ids, len(parts), among)
    bounds = torch.tensor([(part.first, part.last) for part in parts], device=ids.device)
    first, last = bounds[:, 0], bounds[:, 1]
    visits = ((ids >= first[:, None, None]) & (ids < last[:, None, None])).any(-1)
    if among is not None:
        visits[:, : among[0]] = False
        visits[:, among[1] :] = False
    rank, tokens = visits.nonzero(as_tuple=True)
    chosen, first, last = ids[tokens], first[rank, None], last[rank, None]
    is_own = (chosen >= first) & (chosen < last)
    visit_counts = torch.zeros_like(bounds[:, 0]).index_add(0, rank, is_own.sum(1))
    return Rows(tokens, torch.where(is_own, chosen - first, -1), visits.sum(1), visit_counts)


def share_of(tokens: int, index: int, ranks: int) -> tuple[int, int]:
    """Return the first and the last, not included, of the tokens that rank `index` of `ranks` copies of them takes."""
    return tokens * index // ranks, tokens * (index + 1) // ranks


def choices_of(ids: Tensor, visits: int | None = None) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each id that is an expert's, both int64 [N]; `ids` [R, K], -1 for no expert.

    The host waits for their number where `visits` does not say it.
    """
    if not has_values(ids):
        places = torch.arange(ids.numel(), device=ids.device)
    elif visits is None:
        places = (ids >= 0).flatten().nonzero()[:, 0]
    else:
        places = (ids < 0).flatten().sort(stable=True).indices[:visits]
    return places // ids.shape[1], places % ids.shape[1]


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor has values; those by which memory is planned have only sizes."""
    return detect_fake_mode(tensor) is None and not tensor.is_meta


def _balanced(ids: Tensor, ranks: int, among: tuple[int, int] | None) -> Rows:
    """Return rows as many as travel where all experts are chosen alike often; choices that no rank has are left out."""
    (tokens, choices), device = ids.shape, ids.device
    tokens = tokens if among is None else among[1] - among[0]
    visits = math.ceil(ranks * (1 - (1 - 1 / ranks) ** choices))
    rows = torch.zeros(tokens * visits, dtype=torch.int64, device=device)
    # made of ids, so that a graph that is planned takes them for what they are, tensors without values
    own_ids = (ids[:1, :1] * 0).expand(len(rows), math.ceil(choices / visits)).contiguous()
    counts = torch.zeros(ranks, dtype=torch.int64, device=device)
    return Rows(rows, own_ids, counts, counts)
