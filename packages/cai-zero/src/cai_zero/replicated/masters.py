"""Master weights of chunks: as an optimizer steps them, and as checkpoints see them, in halves or not."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch

from cai_mesh.layout import BoxedTensor
from cai_zero.replicated.chunk_weights import ChunkWeights
from cai_zero.replicated.chunks import Chunk


def step(inner: torch.optim.Optimizer, chunks: Sequence[Chunk]) -> None:
    """Step pieces that have their gradients.

    An optimizer with `takes_halves()` and `halves` (such as `cai_kernels.FusedAdamW`) steps halves as they are. For any
    other they become one number for as long as the step takes: there are no activations then.
    """
    in_halves = [
        (weights.pieces, weights.halves.parts) for weights in _weights(chunks) if weights.halves is not None
    ]
    # looked up in the type: a wrapper that looks up what it lacks would not hand `halves` on
    able = hasattr(type(inner), "takes_halves")
    if in_halves and able and inner.takes_halves():  # type: ignore[attr-defined]
        rest(chunks)
        inner.halves = {  # type: ignore[attr-defined]
            piece: both for pieces, parts in in_halves for piece, both in zip(pieces, parts, strict=True)
        }
    else:
        join(chunks)
    inner.step()


def _weights(chunks: Iterable[Chunk]) -> list[ChunkWeights]:
    return [chunk.weights for chunk in chunks]


def join(chunks: Iterable[Chunk]) -> None:
    """Have the numbers, before somebody writes to parameters: what was written to can be told then."""
    for weights in _weights(chunks):
        weights.join()


def rest(chunks: Iterable[Chunk]) -> None:
    """Have those in halves again that somebody has read: what was lent is not there any more."""
    for weights in _weights(chunks):
        weights.split()


@contextmanager
def opened(chunks: Iterable[Chunk]) -> Iterator[None]:
    """Inside, master weights of these chunks are numbers that may be read and written."""
    closed = [
        weights for weights in _weights(chunks) if weights.halves is not None and not weights.halves.joined
    ]
    for weights in closed:
        weights.join()
    try:
        yield
    finally:
        for weights in closed:
            weights.split()


class _Loan:
    """Has the numbers of one chunk at a time."""

    def __init__(self) -> None:
        self._chunk: Chunk | None = None

    def open(self, chunk: Chunk) -> None:
        if self._chunk is not None and self._chunk is not chunk:
            self._chunk.weights.split()
        self._chunk = chunk
        chunk.weights.join()


def boxed(chunks: Iterable[Chunk]) -> dict[str, BoxedTensor]:
    """Master weights by name: views; of halves such that are lent, one chunk after the other."""
    loan, boxes = _Loan(), dict[str, BoxedTensor]()
    for chunk in chunks:
        boxes |= (
            chunk.boxed(chunk.weights.flat.detach()) if chunk.weights.halves is None else _lent(chunk, loan)
        )
    return boxes


def _lent(chunk: Chunk, loan: _Loan) -> dict[str, BoxedTensor]:
    def lend(name: str) -> BoxedTensor:
        loan.open(chunk)
        return chunk.master_boxes[name]

    return {name: replace(shape, lend=partial(lend, name)) for name, shape in chunk.master_shapes.items()}


def saved(chunks: Iterable[Chunk]) -> list[torch.Tensor | None]:
    """Master weights chunk by chunk, for `load`; None where the parameters are those."""
    weights = list[torch.Tensor | None]()
    for chunk in chunks:
        with opened([chunk]):
            flat = chunk.weights.flat.detach()
            weights.append(
                (flat if chunk.weights.halves is None else flat.clone()) if chunk.weights.has_master else None
            )
    return weights


def load(chunks: Sequence[Chunk], masters: Sequence[torch.Tensor | None]) -> bool:
    """Fill master weights with what `saved` gave; whether there were any. Parameters follow when they are gathered."""
    for chunk, master in zip(chunks, masters, strict=True):
        if master is not None and chunk.weights.halves is not None:
            chunk.weights.halves.fill(master)
        elif master is not None:
            chunk.weights.flat.copy_(master)
    return any(master is not None for master in masters)
