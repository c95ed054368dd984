"""Synthetic clicks: ids that follow Zipf's law, and labels that depend on them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cai_mesh import rng


@dataclass(frozen=True)
class Batch:
    """Examples in host memory.

    Args:
        dense: real-valued features [B, F].
        ids: the ids for each table, int64 [B, L].
        labels: 0 or 1, float32 [B].
        odds: log-odds of each label being 1, [B]: what the best model would answer.
    """

    dense: torch.Tensor
    ids: list[torch.Tensor]
    labels: torch.Tensor
    odds: torch.Tensor


class ClickData:
    """Batches as a function of (seed, number).

    Every id of a table has a hidden effect, a standard normal number; the log-odds of a label are the sum of the mean
    effects of its bags and of the dense features with hidden weights, scaled so that `signal` bounds its spread.

    Args:
        tables, rows, bag: number of tables, rows of each, ids of an example in each.
        dense: real-valued features.
        zipf: exponent of the frequencies of ids. Which ids are frequent differs from table to table.
        signal: scale of the log-odds.
        seed: the seed of everything.
    """

    def __init__(
        self, *, tables: int, rows: int, bag: int, dense: int, zipf: float, signal: float, seed: int
    ):
        self._tables, self._rows, self._bag, self._dense = tables, rows, bag, dense
        self._signal, self._seed = signal, seed
        frequency = torch.arange(1, rows + 1, dtype=torch.float64) ** -zipf
        self._cumulative = frequency.cumsum(0) / frequency.sum()
        self._order = [rng.permutation(rows, rng.key(seed, "order", table)) for table in range(tables)]
        self._effects = [self._normal("effect", table, rows) for table in range(tables)]
        self._weights = self._normal("weights", 0, dense)

    def batch(self, number: int, size: int) -> Batch:
        """Batch `number` of `size` examples."""
        dense = self._normal("dense", number, size * self._dense).view(size, self._dense)
        ids, odds = [], dense @ self._weights
        for table in range(self._tables):
            draws = self._uniform(f"ids {table}", number, size * self._bag)
            rank = torch.searchsorted(self._cumulative, draws).clamp_(max=self._rows - 1)
            ids.append(self._order[table][rank].view(size, self._bag))
            odds = odds + self._effects[table][ids[-1]].mean(1)
        odds = odds * self._signal / (self._tables + self._dense) ** 0.5
        labels = self._uniform("labels", number, size) < odds.sigmoid()
        return Batch(dense, ids, labels.float(), odds)

    def batches(self, first: int, count: int, size: int) -> Iterator[Batch]:
        """Batches `first` to `first + count - 1`."""
        return (self.batch(number, size) for number in range(first, first + count))

    def _uniform(self, purpose: str, number: int, count: int) -> torch.Tensor:
        return rng.unit(rng.key(self._seed, purpose, number), torch.arange(count))

    def _normal(self, purpose: str, number: int, count: int) -> torch.Tensor:
        return torch.special.ndtri(self._uniform(purpose, number, count)).float()


def auc(scores: torch.Tensor, labels: torch.Tensor) -> float:
    """Area under the ROC curve: how often a positive example scores above a negative one, ties counting half.

    From ranks (Mann and Whitney, doi:10.1214/aoms/1177730491). `scores` [N]; `labels` [N], 0 or 1. NaN when all labels
    are alike.
    """
    _, inverse, counts = torch.unique(scores.double(), return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[inverse]
    positive = labels > 0.5
    ones = int(positive.sum())
    pairs = ones * (len(labels) - ones)
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / pairs) if pairs else float("nan")
