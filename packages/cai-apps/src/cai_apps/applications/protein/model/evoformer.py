"""The Evoformer (Algorithm 6) and the stack for extra sequences (Algorithm 18): blocks of the same parts."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from cai_apps.applications.protein.model.alignment import ColumnAttention, OuterProductMean, RowAttention
from cai_apps.applications.protein.model.layers import Transition, linear, shared_dropout
from cai_apps.applications.protein.model.pair import TriangleAttention, TriangleMultiplication


@dataclass(frozen=True)
class PairSizes:
    """Sizes of the pair's part of a block.

    Args:
        c_z: width of the pair.
        triangle: width inside triangle multiplications.
        heads, head: the number of heads of triangle attention, and the width of one.
        factor: the inner width of the transition, as a multiple of `c_z`.
        dropout: rate, of what rows or columns share.
    """

    c_z: int = 128
    triangle: int = 128
    heads: int = 4
    head: int = 32
    factor: int = 4
    dropout: float = 0.25


@dataclass(frozen=True)
class BlockSizes:
    """Sizes of a block of the Evoformer.

    Args:
        c_m: width of the alignment.
        heads, head: the number of heads of row and column attention, and the width of one.
        outer: width inside the outer product mean.
        factor: the inner width of the transition, as a multiple of `c_m`.
        dropout: rate, of what the sequences share.
        one_query: column attention has one query for all of a residue, as for extra sequences.
        pair: sizes of the pair's part.
    """

    c_m: int = 256
    heads: int = 8
    head: int = 32
    outer: int = 32
    factor: int = 4
    dropout: float = 0.15
    one_query: bool = False
    pair: PairSizes = PairSizes()


EXTRA = BlockSizes(c_m=64, head=8, one_query=True)
"""Sizes of a block for extra sequences."""


class PairUpdates(nn.Module):
    """The updates of the pair in a block, each from what those before made: lines 6 to 10 of Algorithm 6."""

    def __init__(self, sizes: PairSizes):
        super().__init__()
        c_z, heads, head = sizes.c_z, sizes.heads, sizes.head
        self.dropout = sizes.dropout
        self.outgoing = TriangleMultiplication(c_z, sizes.triangle, outgoing=True)
        self.incoming = TriangleMultiplication(c_z, sizes.triangle, outgoing=False)
        self.starting = TriangleAttention(c_z, heads, head, starting=True)
        self.ending = TriangleAttention(c_z, heads, head, starting=False)
        self.transition = Transition(c_z, sizes.factor)

    def forward(self, z: Tensor, mask: Tensor) -> Tensor:
        """z [B, R, R, c_z] and its mask [B, R, R] -> z."""
        for update, dim in ((self.outgoing, 1), (self.incoming, 1), (self.starting, 1), (self.ending, 2)):
            z = z + shared_dropout(update(z, mask), self.dropout, self.training, dim)
        return z + self.transition(z)


class EvoformerBlock(nn.Module):
    """A block of the alignment and the pair: Algorithm 6, and with `one_query` Algorithm 18."""

    def __init__(self, sizes: BlockSizes):
        super().__init__()
        c_m, c_z = sizes.c_m, sizes.pair.c_z
        self.dropout = sizes.dropout
        self.row = RowAttention(c_m, c_z, sizes.heads, sizes.head)
        self.column = ColumnAttention(c_m, sizes.heads, sizes.head, one_query=sizes.one_query)
        self.transition = Transition(c_m, sizes.factor)
        self.outer = OuterProductMean(c_m, c_z, sizes.outer)
        self.pair = PairUpdates(sizes.pair)

    def forward(self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor) -> tuple[Tensor, Tensor]:
        """m [B, S, R, c_m], z [B, R, R, c_z] and their masks -> m and z."""
        m = m + shared_dropout(self.row(m, z, m_mask), self.dropout, self.training, 1)
        m = m + self.column(m, m_mask)
        m = m + self.transition(m)
        return m, self.pair(z + self.outer(m, m_mask), z_mask)


class Evoformer(nn.Module):
    """Blocks, then the sequence that is folded by itself: lines 1 to 12 of Algorithm 6.

    Args:
        sizes: the sizes of a block.
        blocks: the number of blocks.
        c_s: width of the sequence that is returned; None: extra sequences, of which none is.
    """

    def __init__(self, sizes: BlockSizes, blocks: int, c_s: int | None = 384):
        super().__init__()
        self.blocks = nn.ModuleList(EvoformerBlock(sizes) for _ in range(blocks))
        self.single = None if c_s is None else linear(sizes.c_m, c_s)

    def forward(
        self, m: Tensor, z: Tensor, m_mask: Tensor, z_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """As a block; also s [B, R, c_s] of the first sequence."""
        for block in self.blocks:
            m, z = block(m, z, m_mask, z_mask)
        return m, z, None if self.single is None else self.single(m[:, 0])
