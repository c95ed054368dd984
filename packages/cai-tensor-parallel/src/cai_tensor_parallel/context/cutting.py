"""Which tokens of a row a rank has: a piece of either end, so that all ranks attend to as many keys.

A row of S tokens is 2 n pieces for n ranks, and rank r has the pieces r and 2 n - 1 - r: causal attention of one piece
costs as much more as that of the other costs less (zigzag: Zhu, ring-flash-attention, 2024; Brandon et al.,
arXiv:2311.09431, for single tokens). Of a row of several documents each document is cut so (`documents`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Cut:
    """The cut of rows over ranks, and this rank's part of it; each row is one document.

    Args:
        ranks: the number of ranks; a row has a multiple of twice as many tokens.
        index: this rank's number among them.
    """

    ranks: int
    index: int

    @property
    def multiple(self) -> int:
        """The number of pieces of a row, which divides its tokens."""
        return 2 * self.ranks

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of this rank's pieces."""
        return self.pieces_of(self.index)

    def pieces_of(self, rank: int) -> tuple[int, int]:
        """Return the numbers of a rank's pieces."""
        return rank, self.multiple - 1 - rank

    @property
    def by_ranks(self) -> list[int]:
        """The numbers of all pieces, rank after rank."""
        return [number for rank in range(self.ranks) for number in self.pieces_of(rank)]

    def own(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens of whole rows: [..., S, ...] to [..., S / ranks, ...]."""
        pieces = rows.chunk(self.multiple, dim)
        return torch.cat([pieces[number] for number in self.pieces], dim)

    def in_order(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Return whole rows of the tokens of all ranks, [..., S, ...], which come rank after rank."""
        pieces = gathered.chunk(self.multiple, dim)
        places = {number: place for place, number in enumerate(self.by_ranks)}
        return torch.cat([pieces[places[number]] for number in range(self.multiple)], dim)

    def by_rank(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of whole rows, [..., S, ...], rank after rank: what `in_order` undoes."""
        pieces = rows.chunk(self.multiple, dim)
        return torch.cat([pieces[number] for number in self.by_ranks], dim)

    def places(self, length: int, device: torch.device) -> torch.Tensor:
        """Return where this rank's tokens stand in a row of so many, int64 [1, S / ranks]."""
        return self.own(torch.arange(length, device=device)[None], 1)
