"""A chunk's state cut in pieces, and device memory for one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.gradient import wide
from cai_gemini.chunk.optimizer_step import AdamBlock
from cai_gemini.memory.copies import Copied

PIECE = 2**22  # elements: copies of 16 MB run at the link's rate
SLOTS = 3  # one on its way here, one stepped, one on its way back
GRAIN = 64  # elements from the start of a parameter, at which it may be cut: whole vectors of any processor
ALIGNMENT = 256  # bytes


def buffer_bytes(chunks: Sequence[OffloadedChunk]) -> int:
    """Return the bytes that the device needs for pieces of any of the chunks."""
    return SLOTS * max((_slot_bytes(chunk) for chunk in chunks), default=0)


def _slot_bytes(chunk: OffloadedChunk) -> int:
    """Return the bytes of a piece: three of state, a gradient as wide, and the gradient as it comes or new weights."""
    unit, gradient = chunk.unit, chunk.gradients.dtype
    assert gradient is not None
    numel, master = min(PIECE, unit.shard.numel()), unit.shard.dtype
    coming = [dtype.itemsize for dtype in (gradient, wide(gradient)) if dtype != master]
    widest = max([*coming, unit.weights.element_size()])
    return 4 * _aligned(numel * master.itemsize) + _aligned(numel * widest)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Piece:
    """Neighbouring blocks of a chunk, [low, high) of its elements."""

    low: int
    high: int
    blocks: Sequence[AdamBlock]


def pieces(blocks: Sequence[AdamBlock], most: int) -> list[Piece]:
    """Blocks of a chunk in pieces of up to `most` elements, `GRAIN` at least; blocks are cut where a piece is full."""
    block_lists: list[list[AdamBlock]] = []
    full = 0
    for block in sorted(blocks, key=lambda b: b.low):
        at = block.low
        while at < block.high:
            until = block.high if block.high <= full else at + max(full - at, 0) // GRAIN * GRAIN
            if until == at:
                block_lists.append([])
                full = at + most
            else:
                block_lists[-1].append(replace(block, low=at, high=until))
                at = until
    return [Piece(some[0].low, some[-1].high, some) for some in block_lists]


class Views(NamedTuple):
    """Tensors of a piece on the device: state and gradient in the dtype of master weights; over one another the
    gradient in that of the host's, where it has another, and the new weights, which are made when it has been read."""

    state: list[torch.Tensor]
    gradient: torch.Tensor
    coming: torch.Tensor | None
    leaving: torch.Tensor


class Slot:
    """Device memory of a piece.

    Args:
        memory: [bytes], uint8.
        sent: the last copies from here; another piece may come once they are done.
    """

    def __init__(self, memory: torch.Tensor, sent: Copied):
        self._memory, self._views = memory, dict[tuple, Views]()
        self.sent = sent

    def views(self, host_tensors: Sequence[torch.Tensor]) -> Views:
        """Return views for tensors such as `StreamedSteps._step_piece` takes; the same for pieces of one shape."""
        master, *_, gradient, weights = host_tensors
        like = (master.numel(), master.dtype, gradient.dtype, weights.dtype)
        if like not in self._views:
            size = _aligned(master.numel() * master.element_size())
            *state, wide_gradient = (self._view(i * size, master.numel(), master.dtype) for i in range(4))
            same = gradient.dtype == master.dtype
            coming = None if same else self._view(4 * size, master.numel(), gradient.dtype)
            leaving = self._view(4 * size, master.numel(), weights.dtype)
            self._views[like] = Views(state, wide_gradient, coming, leaving)
        return self._views[like]

    def _view(self, at: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._memory[at : at + numel * dtype.itemsize].view(dtype)
