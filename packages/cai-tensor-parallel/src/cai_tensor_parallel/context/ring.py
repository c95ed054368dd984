"""Attention whose keys go from rank to rank: none has those of whole rows, and what each finds is merged.

Ring attention (Liu et al., arXiv:2310.01889), over the pieces of `Cut`: of the keys that come from another rank each
query piece sees a piece whole or not at all, so that no mask is ever made, and all ranks have as much to do in every
round. Keys are on their way while those that came before are attended to; in backward the gradients of keys travel with
them, and come home after the last round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch

from cai_mesh.comm import Members, start_shift
from cai_mesh.protocols import AttentionCall, AttentionParts
from cai_tensor_parallel.context.cutting import Cut
from cai_tensor_parallel.context.documents import DocumentCut

Halves = tuple[int, ...]
"""Pieces of a rank: (0,) its first, (1,) its second, (0, 1) both."""


@dataclass(frozen=True)
class Block:
    """Some queries of a rank and the keys that they see, all of them or up to their own position.

    Args:
        queries: the pieces of the rank's queries.
        keys: the pieces of the other rank's keys.
        causal: whether a query sees keys up to its own position: queries and keys are the same tokens.
    """

    queries: Halves
    keys: Halves
    causal: bool = False


def blocks_of(rank: int, source: int, *, causal: bool, documents: bool) -> list[Block]:
    """Return what a rank's queries see of the keys of another, or of its own.

    Pieces of two ranks are in the order of the lower rank's first, the higher's first, the higher's second, the lower's
    second. Of rows of several documents pieces go by themselves, as those of a document do not lie side by side.
    """
    if not causal:
        blocks = [Block((0, 1), (0, 1))]
    elif source == rank:
        if not documents:
            return [Block((0, 1), (0, 1), causal=True)]
        return [Block((0,), (0,), causal=True), Block((1,), (0,)), Block((1,), (1,), causal=True)]
    else:
        blocks = [Block((0, 1), (0,))] if source < rank else [Block((1,), (0, 1))]
    if not documents:
        return blocks
    return [Block((query,), (key,)) for block in blocks for query in block.queries for key in block.keys]


@dataclass(frozen=True)
class Ring:
    """The ranks that pass keys on, and how each attends.

    Args:
        ranks: the ranks.
        parts: the attention of one rank to some keys.
        call: the arguments of the layer; documents are those of whole rows.
    """

    ranks: Members
    parts: AttentionParts
    call: AttentionCall

    def blocks(self, source: int) -> list[Block]:
        """Return what this rank's queries see of the keys of another."""
        documents = self.call.cu_seqlens is not None
        return blocks_of(self.ranks.rank, source, causal=self.call.causal, documents=documents)

    def source(self, step: int) -> int:
        """Return the rank whose keys are here in a round."""
        return (self.ranks.rank - step) % self.ranks.size


class _Calls:
    """The arguments of each block of a ring.

    Args:
        ring: the ring.
        length: the tokens of a rank.
    """

    def __init__(self, ring: Ring, length: int):
        self._ring, self._length = ring, length

    @cached_property
    def _documents(self) -> DocumentCut:
        ranks, starts = self._ring.ranks, self._ring.call.cu_seqlens
        assert starts is not None
        return DocumentCut(Cut(ranks.size, ranks.rank), starts, self._length * ranks.size)

    def of(self, block: Block, source: int) -> AttentionCall:
        """Return the arguments of a block with the keys of a rank."""
        call, ranks = self._ring.call, self._ring.ranks
        if call.cu_seqlens is None:
            return replace(call, causal=block.causal)
        cut = self._documents.row_cut
        query_starts, key_starts = (
            self._documents.piece_starts(cut.pieces_of(rank)[halves[0]])
            for rank, halves in ((ranks.rank, block.queries), (source, block.keys))
        )
        return replace(call, causal=block.causal, cu_seqlens=key_starts, query_cu_seqlens=query_starts)


def _of(tensor: torch.Tensor, halves: Halves) -> torch.Tensor:
    """Return pieces of [B, N, T, ...], of which a rank has two."""
    return tensor if len(halves) == 2 else tensor.chunk(2, 2)[halves[0]]


class RingAttention(torch.autograd.Function):
    """`apply(query, key, value, sinks, ring)`: [B, N, T, H] and [B, Nkv, T, H] of a rank -> [B, N, T, H]. Collective.

    Sinks [N] are one more part of the softmax, of no value, merged when all keys have been seen; None: none.
    """

    @staticmethod
    def forward(
        ctx,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: Ring,
    ) -> torch.Tensor:
        calls, parts = _Calls(ring, query.shape[2]), ring.parts
        found: list[tuple[torch.Tensor, torch.Tensor] | None] = [None, None]
        here = torch.stack((key, value))
        for step in range(ring.ranks.size):
            coming = start_shift(here, ring.ranks) if step + 1 < ring.ranks.size else None
            source = ring.source(step)
            for block in ring.blocks(source):
                keys, values = _of(here[0], block.keys), _of(here[1], block.keys)
                out, lse = parts.forward(_of(query, block.queries), keys, values, calls.of(block, source))
                shares = zip(out.chunk(len(block.queries), 2), lse.chunk(len(block.queries), 2), strict=True)
                for half, share in zip(block.queries, shares, strict=True):
                    before = found[half]
                    found[half] = share if before is None else parts.merge(before, share)
            if coming is not None:
                here = coming.wait()
        out, lse = (torch.cat(halves, 2) for halves in zip(*filter(None, found), strict=True))
        if sinks is not None:
            nothing = torch.zeros_like(out), sinks.to(lse.dtype)[:, None].expand_as(lse).contiguous()
            out, lse = parts.merge((out, lse), nothing)
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, sinks, out, lse)
        ctx.ring = ring
        return out

    @staticmethod
    def backward(ctx, dout: torch.Tensor):
        query, key, value, sinks, out, lse = ctx.saved_tensors
        ring: Ring = ctx.ring
        calls, parts, wide = _Calls(ring, query.shape[2]), ring.parts, lse.dtype
        here = torch.stack((key, value))
        dquery = torch.zeros_like(query, dtype=wide)
        leaving = None
        for step in range(ring.ranks.size):
            coming = start_shift(here, ring.ranks) if step + 1 < ring.ranks.size else None
            source, gradients = ring.source(step), torch.zeros_like(here, dtype=wide)
            for block in ring.blocks(source):
                keys, values = _of(here[0], block.keys), _of(here[1], block.keys)
                asked, there = (_of(each, block.queries) for each in (dout, out))
                share, *of_keys = parts.backward(
                    asked,
                    _of(query, block.queries),
                    keys,
                    values,
                    there,
                    _of(lse, block.queries),
                    calls.of(block, source),
                )
                _of(dquery, block.queries).add_(share)
                for total, gradient in zip(gradients, of_keys, strict=True):
                    _of(total, block.keys).add_(gradient)
            if leaving is not None:
                gradients = gradients + leaving.wait()
            leaving = start_shift(gradients, ring.ranks)
            if coming is not None:
                here = coming.wait()
        assert leaving is not None
        dkey, dvalue = leaving.wait()
        dsinks = None if sinks is None else _sinks_gradient(dout, out, lse, sinks)
        return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype), dsinks, None


def _sinks_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of sinks, [N]: each takes its share of the softmax and gives nothing for it."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(share * (dout.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
