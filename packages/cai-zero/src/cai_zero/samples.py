"""Gradients clipped sample by sample, each by its own norm, before they are summed.

AlphaFold is trained so (supplement, section 1.11.3). A sample's norm is known when its backward has ended, so until the
step's last backward each rank holds two unsharded gradients, in every stage: of the sample, and the sum of those
before it. Nothing is communicated meanwhile.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer
from cai_zero.replicated.optimizer import ShardedOptimizer
from cai_zero.stage3.sharding import ModuleSharding


class SampleClip:
    """Clips the gradient of each backward, which is one sample's, and sums them over the data ranks.

        clip = SampleClip(optimizer)                    # of shard_optimizer, or sharding_of(model) in stage 3
        with clip.step(0.1):
            for sample in samples:
                with clip.defer():
                    loss_of(model, sample).backward()
            clip.finish()
        optimizer.step()
        optimizer.zero_grad()

    It is a `cai_mesh.protocols.GradSync`, so a `PipelineRunner` of one stage drives it too.

    Args:
        inner: sums, or averages, the gradients of the data ranks.

    Raises `PlanError` where a rank has a part of a sample's gradient: on tensor-parallel ranks and stages.
    """

    def __init__(self, inner: ShardedOptimizer | ModuleSharding):
        mesh = inner.mesh if isinstance(inner, ShardedOptimizer) else inner.ranks.mesh
        parts = [axis for axis in ("pp", "cp", "tp") if mesh is not None and mesh.degree(axis) > 1]
        if parts:
            raise PlanError(
                "a rank has a part of a sample's gradient, and knows no norm of the whole",
                got=f"a mesh with {', '.join(parts)}",
                fix="clip the norm of the step: cai_mesh.clip_grad_norm_",
            )
        self._inner, self._most = inner, float("inf")
        self._sums: list[torch.Tensor] | None = None

    @contextlib.contextmanager
    def step(self, most: torch.Tensor | float) -> Iterator[None]:
        """All backwards of a step run inside, and `finish`.

        Args:
            most: the norm that no sample's gradient exceeds, as its backward makes it, before the sum.
        """
        self._most, self._sums = most, None
        with self._inner.no_sync():
            yield

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """The backward inside is of one sample."""
        yield
        self._take()

    def finish(self) -> None:
        """Take the last sample, if its backward was not under `defer`, and sum all over the data ranks. Collective."""
        self._take()
        assert self._sums is not None
        for buffer, total in zip(self._buffers(), self._sums, strict=True):
            buffer.put(total)
        self._sums = None
        self._inner.finish()

    def _buffers(self) -> Sequence[GradBuffer]:
        return self._inner.buffers

    @torch.no_grad()
    def _take(self) -> None:
        """Add the gradients that have arrived, clipped, to those of the samples before."""
        buffers = self._buffers()
        gradients = [buffer.take() for buffer in buffers]
        norm = torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]).norm()
        factor = (self._most / norm).clamp(max=1.0)
        if self._sums is None:
            self._sums = [gradient * factor for gradient in gradients]
        else:
            torch._foreach_mul_(gradients, factor)
            torch._foreach_add_(self._sums, gradients)
        for buffer in buffers:
            buffer.close()
