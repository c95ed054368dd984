"""Attention whose keys go from rank to rank: none has those of whole rows, and what each finds is merged.

Ring attention (Liu et al., arXiv:2310.01889), over the pieces of `Cut`: of the keys that come from another rank each
query piece sees a piece whole or not at all, so that no mask is ever made, and all ranks have as much to do in every
round. Keys are on their way while those that came before are attended to; in backward the gradients of keys travel with
them, and come home after the last round.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from cai_mesh.comm import Members, start_shift
from cai_mesh.operators import operator
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
    """The ranks that pass keys on, and how each attends: the arguments of the operators.

    Args:
        ranks: the ranks.
        parts: the attention of one rank to some keys.
        call: the arguments of the layer, without sinks; documents are those of whole rows.
        length: the tokens of a rank.
    """

    ranks: Members
    parts: AttentionParts
    call: AttentionCall
    length: int

    def blocks(self, source: int) -> list[tuple[Block, AttentionCall]]:
        """Return what this rank's queries see of the keys of another, each block with its arguments."""
        documents = self.call.cu_seqlens is not None
        blocks = blocks_of(self.ranks.rank, source, causal=self.call.causal, documents=documents)
        return [(block, self._call(block, source)) for block in blocks]

    def source(self, step: int) -> int:
        """Return the rank whose keys are passing in a round."""
        return (self.ranks.rank - step) % self.ranks.size

    @cached_property
    def _documents(self) -> DocumentCut:
        assert self.call.cu_seqlens is not None
        row_cut = Cut(self.ranks.size, self.ranks.rank)
        return DocumentCut(row_cut, self.call.cu_seqlens, self.length * self.ranks.size)

    def _call(self, block: Block, source: int) -> AttentionCall:
        if self.call.cu_seqlens is None:
            return replace(self.call, causal=block.causal)
        row_cut = self._documents.row_cut
        query_starts, key_starts = (
            self._documents.piece_starts(row_cut.pieces_of(rank)[halves[0]])
            for rank, halves in ((self.ranks.rank, block.queries), (source, block.keys))
        )
        return replace(self.call, causal=block.causal, cu_seqlens=key_starts, query_cu_seqlens=query_starts)


def ring_attention(
    ranks: Members,
    parts: type[AttentionParts],
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    call: AttentionCall,
) -> torch.Tensor:
    """Attend with a rank's queries to the keys of all ranks, which are passed on. Collective; one operator in a graph.

    Args:
        ranks: the ranks.
        parts: the class that attends on one rank to some keys, of a module's own and made without arguments.
        query: [B, N, T, H], this rank's.
        key, value: [B, Nkv, T, H], this rank's.
        call: the arguments of the layer, without window, mask, prefixes and dropout. Sinks are one more part of the
            softmax, of no value, merged when all keys have been seen.

    Returns [B, N, T, H].
    """
    options = (ranks.name, ranks.size, ranks.rank, f"{parts.__module__}:{parts.__qualname__}")
    output = _RingAttention.apply(query, key, value, call.sinks, call.cu_seqlens, options, _scores(call))
    assert isinstance(output, torch.Tensor)
    return output


def _scores(call: AttentionCall) -> tuple[float, bool, float | None]:
    return call.scale, call.causal, call.softcap


def _ring(
    query: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    group: str,
    size: int,
    rank: int,
    parts: str,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> Ring:
    """Return the ring of an operator's arguments."""
    module, _, name = parts.partition(":")
    attend: AttentionParts = getattr(importlib.import_module(module), name)()
    call = AttentionCall(scale, causal=causal, softcap=softcap, cu_seqlens=cu_seqlens)
    return Ring(Members(group, size, rank), attend, call, query.shape[2])


def _of(tensor: torch.Tensor, halves: Halves) -> torch.Tensor:
    """Return pieces of [B, N, T, ...], of which a rank has two."""
    return tensor if len(halves) == 2 else tensor.chunk(2, 2)[halves[0]]


def _empty(query: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(query.shape), query.new_empty(query.shape[:-1], dtype=wide)


@operator("cai_tensor_parallel::ring_attention", fake=_empty)
def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sinks: torch.Tensor | None,
    cu_seqlens: torch.Tensor | None,
    group: str,
    size: int,
    rank: int,
    parts: str,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what a rank's queries find, and the log-sum-exp of their scores."""
    ring = _ring(query, cu_seqlens, group, size, rank, parts, scale, causal, softcap)
    merged: list[tuple[torch.Tensor, torch.Tensor] | None] = [None, None]
    passing = torch.stack((key, value))
    for step in range(size):
        coming = start_shift(passing, ring.ranks) if step + 1 < size else None
        for block, call in ring.blocks(ring.source(step)):
            keys, values = _of(passing[0], block.keys), _of(passing[1], block.keys)
            out, lse = ring.parts.forward(_of(query, block.queries), keys, values, call)
            shares = zip(*(tensor.chunk(len(block.queries), 2) for tensor in (out, lse)), strict=True)
            for half, share in zip(block.queries, shares, strict=True):
                before = merged[half]
                merged[half] = share if before is None else ring.parts.merge(before, share)
        if coming is not None:
            passing = coming.wait()
    out, lse = (torch.cat(halves, 2) for halves in zip(*filter(None, merged), strict=True))
    if sinks is not None:
        nothing = torch.zeros_like(out), sinks.to(lse.dtype)[:, None].expand_as(lse).contiguous()
        out, lse = ring.parts.merge((out, lse), nothing)
    return out.to(query.dtype), lse


def _empty_gradients(dout: Any, query: Any, key: Any, value: Any, *_: Any) -> tuple[torch.Tensor, ...]:
    return tuple(
        torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in (query, key, value)
    )


@operator("cai_tensor_parallel::ring_attention_backward", fake=_empty_gradients)
def _differentiate(
    dout: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor | None,
    group: str,
    size: int,
    rank: int,
    parts: str,
    scale: float,
    causal: bool,
    softcap: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of a rank's queries, keys and values; those of keys travel with them, and come home."""
    ring = _ring(query, cu_seqlens, group, size, rank, parts, scale, causal, softcap)
    passing, wide = torch.stack((key, value)), lse.dtype
    dquery = torch.zeros_like(query, dtype=wide, memory_format=torch.contiguous_format)
    leaving = None
    for step in range(size):
        coming = start_shift(passing, ring.ranks) if step + 1 < size else None
        gradients = torch.zeros_like(passing, dtype=wide)
        for block, call in ring.blocks(ring.source(step)):
            of_queries = (_of(tensor, block.queries) for tensor in (dout, query))
            keys = (_of(tensor, block.keys) for tensor in passing)
            of_forward = (_of(tensor, block.queries) for tensor in (out, lse))
            share, *of_keys = ring.parts.backward(*of_queries, *keys, *of_forward, call)
            _of(dquery, block.queries).add_(share)
            for total, gradient in zip(gradients, of_keys, strict=True):
                _of(total, block.keys).add_(gradient)
        if leaving is not None:
            gradients = gradients + leaving.wait()
        leaving = start_shift(gradients, ring.ranks)
        if coming is not None:
            passing = coming.wait()
    assert leaving is not None
    dkey, dvalue = leaving.wait()
    return dquery.to(query.dtype), dkey.to(key.dtype), dvalue.to(value.dtype)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, cu_seqlens, options, scores):
        out, lse = _attend(query, key, value, sinks, cu_seqlens, *options, *scores)
        ctx.save_for_backward(query, key, value, sinks, cu_seqlens, out, lse)
        ctx.options, ctx.scores = options, scores
        return out

    @staticmethod
    def backward(ctx, dout):
        query, key, value, sinks, cu_seqlens, out, lse = ctx.saved_tensors
        gradients = _differentiate(dout, query, key, value, out, lse, cu_seqlens, *ctx.options, *ctx.scores)
        dsinks = None if sinks is None else _sinks_gradient(dout, out, lse, sinks)
        return *gradients, dsinks, None, None, None


def _sinks_gradient(
    dout: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of sinks, [N]: each takes its share of the softmax and gives nothing for it."""
    share = (sinks.to(lse.dtype)[:, None] - lse).exp()
    return -(share * (dout.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
