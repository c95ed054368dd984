"""The cut of rows of several documents: a piece of either end of each document, and as many tokens on every rank.

Where a document's tokens do not divide into 2 n pieces, some pieces have one more. If P tokens of a row come before a
place, piece k has (P + k) // 2n of them: over all k that adds up to P (Hermite's identity), so nothing is left over,
and of whole rows, whose S tokens divide, every piece has S / 2n, whatever the documents are. A row of one document is
cut as `Cut` cuts it.
"""

from __future__ import annotations

from functools import cached_property

import torch

from cai_tensor_parallel.context.cutting import Cut


class DocumentCut:
    """The cut of rows over ranks, and this rank's part of it, with the methods of `Cut`.

    A rank has its piece r of each document, one after the other, and then the pieces 2 n - 1 - r. No boundary is read
    on the host.

    Args:
        row_cut: the ranks.
        starts: [B, D + 1] int32 or int64: where documents begin and rows end, whose tokens `row_cut.multiple` divides.
        length: the tokens of a row, S.
        batch: the dim of the rows of all tensors.
    """

    def __init__(self, row_cut: Cut, starts: torch.Tensor, length: int, batch: int = 0):
        self.row_cut, self._starts, self._length, self._batch = row_cut, starts.long(), length, batch

    @cached_property
    def _piece_starts(self) -> torch.Tensor:
        """Where each document's tokens begin within each piece, int64 [B, 2 n, D + 1]."""
        numbers = torch.arange(self.row_cut.multiple, device=self._starts.device)
        return (self._starts[:, None] + numbers[:, None]) // self.row_cut.multiple

    @cached_property
    def _places(self) -> torch.Tensor:
        """Where the tokens of all ranks stand in their row, rank after rank, int64 [B, S]."""
        starts, sizes = self._piece_starts, self._piece_starts.diff(dim=2)
        rows, pieces, _ = sizes.shape
        tokens = (
            torch.arange(self._length // pieces, device=starts.device).expand(rows, pieces, -1).contiguous()
        )
        document = torch.searchsorted(starts, tokens, right=True) - 1
        first = self._starts[:, None, :-1] + sizes.cumsum(1) - sizes - starts[:, :, :-1]
        places = tokens + first.gather(2, document)
        return places[:, self.row_cut.by_ranks].flatten(1)

    @cached_property
    def _arrivals(self) -> torch.Tensor:
        """Where each token of a row stands rank after rank, int64 [B, S]."""
        return _inverse(self._places, self._length)

    def places(self, length: int, device: torch.device) -> torch.Tensor:
        """Return where this rank's tokens stand in their rows, int64 [B, S / ranks]."""
        return self._places.chunk(self.row_cut.ranks, 1)[self.row_cut.index]

    def own(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return this rank's tokens of whole rows: [..., S, ...] to [..., S / ranks, ...]."""
        places = self.places(self._length, rows.device)
        return _taken(rows, places, None, dim, self._batch)

    def in_order(self, gathered: torch.Tensor, dim: int) -> torch.Tensor:
        """Return whole rows of the tokens of all ranks, [..., S, ...], which come rank after rank."""
        return _taken(gathered, self._arrivals, self._places, dim, self._batch)

    def by_rank(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Return the tokens of whole rows, [..., S, ...], rank after rank: what `in_order` undoes."""
        return _taken(rows, self._places, self._arrivals, dim, self._batch)

    def piece_starts(self, number: int) -> torch.Tensor:
        """Return where the documents begin within one piece, int32 [B, D + 1]."""
        return self._piece_starts[:, number].int()

    def key_starts(self, number: int) -> torch.Tensor:
        """Return where the documents of the keys begin that one piece's queries may see, int32 [B, D + 1]."""
        return self._seen_starts(number).int()

    def keys_seen(self, gathered: torch.Tensor, number: int) -> torch.Tensor:
        """Return the keys of each document up to the end of one piece of it: (number + 1) S / 2n in all.

        Args:
            gathered: keys or values [B, Nkv, S, H] of all ranks, rank after rank.
            number: the number of the piece.

        Returns [B, Nkv, (number + 1) S / 2n, H], by document, in order.
        """
        starts = self._seen_starts(number)
        count = (number + 1) * self._length // self.row_cut.multiple
        tokens = torch.arange(count, device=starts.device).expand(len(starts), -1).contiguous()
        document = torch.searchsorted(starts, tokens, right=True) - 1
        places = tokens + (self._starts - starts).gather(1, document)
        arrivals = self._arrivals.gather(1, places)
        return _taken(gathered, arrivals, _inverse(arrivals, self._length), 2, 0)

    def _seen_starts(self, number: int) -> torch.Tensor:
        return self._piece_starts[:, : number + 1].sum(1)


def cut_of(row_cut: Cut, starts: torch.Tensor | None, length: int, batch: int = 0) -> Cut | DocumentCut:
    """Return the cut of rows with such documents.

    Args:
        row_cut: the ranks.
        starts: the beginnings of documents and ends of rows, [B, D + 1]; None: a row is one document.
        length: the tokens of a row.
        batch: the dim of the rows of all tensors.
    """
    if starts is None or row_cut.ranks == 1:  # one rank has rows as they are
        return row_cut
    return DocumentCut(row_cut, starts, length, batch)


def _inverse(places: torch.Tensor, length: int) -> torch.Tensor:
    """Return where each of `length` places stands among some, int64 [B, length]; -1: nowhere."""
    numbers = torch.arange(places.shape[1], device=places.device).expand_as(places)
    return places.new_full((len(places), length), -1).scatter(1, places, numbers)


def _taken(
    rows: torch.Tensor, places: torch.Tensor, inverse: torch.Tensor | None, dim: int, batch: int
) -> torch.Tensor:
    """Return some places of rows along `dim`; with `inverse`, differentiable.

    Args:
        rows: [..., B, ..., S, ...].
        places: [B, T], none of them twice.
        inverse: [B, S]: where each place stands in the result; -1: nowhere.
        dim: the dim of the places.
        batch: the dim of the rows.
    """
    if inverse is None or not rows.requires_grad:
        return rows.gather(dim, _wide(places, rows, dim, batch))
    return _Taken.apply(rows, places, inverse, dim, batch)


def _wide(places: torch.Tensor, rows: torch.Tensor, dim: int, batch: int) -> torch.Tensor:
    """Return places [B, T] as an index along `dim` of rows."""
    shape = [1] * rows.dim()
    shape[batch], shape[dim] = places.shape
    sizes = list(rows.shape)
    sizes[dim] = places.shape[1]
    return places.view(shape).expand(sizes)


class _Taken(torch.autograd.Function):
    """Places of rows; its gradient is taken from places, too, in place of sums that wait for each other."""

    @staticmethod
    def forward(ctx, rows, places, inverse, dim, batch):
        ctx.save_for_backward(inverse)
        ctx.dims = dim, batch
        return rows.gather(dim, _wide(places, rows, dim, batch))

    @staticmethod
    def backward(ctx, gradient):
        (inverse,) = ctx.saved_tensors
        dim, batch = ctx.dims
        of_rows = gradient.gather(dim, _wide(inverse.clamp_min(0), gradient, dim, batch))
        nowhere = _wide(inverse < 0, of_rows, dim, batch)
        return of_rows.masked_fill(nowhere, 0), None, None, None, None
