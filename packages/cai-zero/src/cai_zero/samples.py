"""Gradients clipped sample by sample, each by its own norm, before they are summed.

AlphaFold is trained so (supplement, section 1.11.3). A sample's norm is known when its backward has ended, so until the
step's last backward each rank holds two unsharded gradients, in every stage: of the sample, and the sum of those
before it. Nothing is communicated meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cai_mesh.gradients import GradBuffer
from cai_zero.module import ModuleSharding
from cai_zero.optimizer import ShardedOptimizer


class SampleClip:
    """A `cai_mesh.protocols.GradSync` around one of a sharded model or optimizer: one backward is one sample.

    Args:
        inner: sums gradients over data ranks. All of a sample's gradient must be on its rank, so there are neither
            tensor-parallel ranks nor stages.

    Attributes:
        most: the norm that no sample's gradient exceeds; set before a step, a scalar or a tensor on the device.
    """

    def __init__(self, inner: ShardedOptimizer | ModuleSharding):
        self._inner, self.most = inner, float("inf")
        self._sums: list[torch.Tensor] | None = None

    @contextlib.contextmanager
    def step(self, most: torch.Tensor | float) -> Iterator[None]:
        """All backwards of a step run inside, and `finish`; `most`: the norm that none exceeds."""
        self.most, self._sums = most, None
        with self._inner.no_sync():
            yield

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """The backward inside is of one sample, and another follows."""
        yield
        self._take()

    def finish(self) -> None:
        """The last sample's backward has ended: sum all over the data ranks. Collective."""
        self._take()
        assert self._sums is not None
        for buffer, held in zip(self._buffers(), self._sums, strict=True):
            buffer.put(held)
        self._sums = None
        self._inner.finish()

    def _buffers(self) -> Sequence[GradBuffer]:
        return self._inner.buffers

    @torch.no_grad()
    def _take(self) -> None:
        """Add the gradients that have arrived, clipped, to those of the samples before."""
        buffers = self._buffers()
        found = [buffer.take() for buffer in buffers]
        norm = torch.stack([torch.linalg.vector_norm(each) for each in found]).norm()
        factor = (self.most / norm).clamp(max=1.0)
        if self._sums is None:
            self._sums = [each * factor for each in found]
        else:
            torch._foreach_add_(self._sums, torch._foreach_mul(found, factor))
        for buffer in buffers:
            buffer.close()
