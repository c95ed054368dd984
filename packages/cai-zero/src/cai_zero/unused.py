"""Parameters that have never had a gradient: an optimizer leaves them as they are, weight decay and all.

So do torch's, which pass over a parameter whose `.grad` is None; in a chunk its gradient would be zero. What one rank
does not use another may, so the ranks agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cai_mesh.comm import all_gather_object
from cai_mesh.gradients import GradBuffer
from cai_zero.chunks import Chunk
from cai_zero.ranks import DataRanks

Places = set[tuple[int, int]]


class Unused:
    """Which parameters no rank has had a gradient for.

    The ranks talk about it once a step for as long as there are any. A parameter that was used once counts as used.

    Args:
        buffers: of all chunks, alike on all ranks.
        ranks: that hold the same parameters, or shards of them.
    """

    def __init__(self, buffers: Sequence[GradBuffer], ranks: DataRanks):
        self._buffers, self._ranks = buffers, ranks
        self.places: Places = {(i, j) for i, buffer in enumerate(buffers) for j in range(len(buffer.params))}
        """(chunk, parameter in it), as of the last `agree`."""

    def agree(self) -> Places:
        """Collective, after the backwards of a step have been taken."""
        if self.places:
            left = {(i, j) for i, j in self.places if j not in self._buffers[i].used}
            for group in (self._ranks.copies, self._ranks.shard):
                left = set.intersection(*all_gather_object(left, group))
            self.places = left
        return self.places


@contextlib.contextmanager
def kept(chunks: Sequence[Chunk], unused: Places) -> Iterator[None]:
    """A step inside leaves the unused parameters' parts of the shards as they are."""
    parts: list[torch.Tensor] = []
    for i, chunk in enumerate(chunks):
        names = {chunk.chunk.names[j] for k, j in unused if k == i}
        for part in chunk.chunk.overlaps(chunk.low, chunk.low + chunk.flat.numel()) if names else ():
            if part.slot.name in names:
                parts.append(chunk.flat.detach()[part.start : part.start + part.high - part.low])
    before = [part.clone() for part in parts]
    yield
    for part, value in zip(parts, before, strict=True):
        part.copy_(value)
