"""Which tokens of a row a rank has: a piece of either end, so that all ranks attend to as many keys.

A row of S tokens is 2 n pieces for n ranks, and rank r has the pieces r and 2 n - 1 - r: causal attention of one piece
costs as much more as that of the other costs less (zigzag: Zhu, ring-flash-attention, 2024; Brandon et al.,
arXiv:2311.09431, for single tokens).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cut:
    """The cut of rows over ranks, and this rank's part of it.

    Args:
        ranks: the number of ranks; a row has a multiple of twice as many tokens.
        index: this rank's number among them.
    """

    ranks: int
    index: int

    @property
    def multiple(self) -> int:
        """The number that divides the tokens of a row."""
        return 2 * self.ranks

    def own(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens of whole rows: [..., S, ...] to [..., S / ranks, ...]."""
        pieces = rows.chunk(self.multiple, dim)
        return torch.cat([pieces[number] for number in self._pieces(self.index)], dim)

    def in_order(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Return whole rows of the tokens of all ranks, [..., S, ...], which come rank after rank."""
        pieces = gathered.chunk(self.multiple, dim)
        places = {
            number: 2 * rank + place
            for rank in range(self.ranks)
            for place, number in enumerate(self._pieces(rank))
        }
        return torch.cat([pieces[places[number]] for number in range(self.multiple)], dim)

    def by_rank(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of whole rows, [..., S, ...], rank after rank: what `in_order` undoes."""
        pieces = rows.chunk(self.multiple, dim)
        return torch.cat([pieces[number] for rank in range(self.ranks) for number in self._pieces(rank)], dim)

    def spans(self, length: int) -> list[tuple[int, int]]:
        """Return the first place of each piece of this rank in a row of so many tokens, and the one after its last."""
        size = length // self.multiple
        return [(number * size, (number + 1) * size) for number in self._pieces(self.index)]

    def _pieces(self, rank: int) -> tuple[int, int]:
        return rank, self.multiple - 1 - rank
