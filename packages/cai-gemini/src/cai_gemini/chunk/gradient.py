"""A chunk's gradient between backward and step: on its way, summed with others, complete."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import torch

from cai_gemini.chunk.unit import Unit
from cai_gemini.memory.copies import Copied
from cai_gemini.memory.pinned import HostPool
from cai_gemini.memory.worker import Worker
from cai_mesh.layout import parts_by_axes

Axes = frozenset[str]
Squares = dict[Axes, torch.Tensor]
Parts = dict[Axes, list[tuple[int, int]]]
BLOCK = 2**20  # elements


@dataclass(eq=False)
class Gradient:
    """A chunk's gradient between backward and step.

    Args:
        tensor: [n]; complete once settled.
        sent: its copy from the device.
        squares: sums of its squares by the mesh axes along which ranks hold different elements, while nobody else could
            have written to it.
        adding: the sum with a further backward's, under way.
    """

    tensor: torch.Tensor
    sent: Copied | None
    squares: Squares | None
    adding: Future[None] | None = None

    def settled(self) -> torch.Tensor:
        """The gradient, complete."""
        if self.adding is not None:
            self.adding.result()
        if self.sent is not None:
            self.sent.synchronize()
            self.sent = None
        return self.tensor

    def add(
        self, more: torch.Tensor, sent: Copied | None, worker: Worker, pool: HostPool, *, copies: bool = False
    ) -> None:
        """Add another, which is `sent` here, or here; gradients of several backwards are summed in float32 at least.

        copies: whether the sum goes to the device again.
        """
        if sent is None:
            self.squares = None
            self.tensor = self.tensor.to(wide(more.dtype)).add_(more)
        else:
            self._add_later(more, sent, worker, pool, copies)

    def _add_later(
        self, more: torch.Tensor, sent: Copied, worker: Worker, pool: HostPool, copies: bool
    ) -> None:
        first, before = self.sent, self.adding
        self.squares = self.sent = None

        def add() -> None:
            if before is not None:
                before.result()
            if first is not None:
                first.synchronize()
            sent.synchronize()
            total = self.tensor
            if total.dtype != wide(more.dtype):
                total = pool.take(total.numel(), wide(more.dtype), copies=copies)
            _add(total, self.tensor, more)
            if total is not self.tensor:
                pool.give(self.tensor)
            self.tensor = total
            pool.give(more)

        self.adding = worker.submit(add)


def _add(total: torch.Tensor, first: torch.Tensor, more: torch.Tensor) -> None:
    """`total = first + more` in the dtype of `total`, block by block: what is widened stays in the cache."""
    for at in range(0, total.numel(), BLOCK):
        part = slice(at, at + BLOCK)
        if total is not first:
            total[part].copy_(first[part])
        total[part].add_(more[part])


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients of `dtype` are summed: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def counted(unit: Unit, indices: Iterable[int]) -> Parts:
    """Ranges of a unit's shard whose gradients count in the norm on this rank, by the axes along which they differ.

    indices: the kept parameters wanted, in order. Ranges of neighbours are joined; padding between them is zero.
    """
    counted_parts: Parts = {}
    before: tuple[int, Axes] | None = None
    for i in indices:
        low, _ = unit.ranges[i]
        for start, stop, axes in parts_by_axes(unit.kept[i]):
            ranges = counted_parts.setdefault(axes, [])
            if ranges and before == (i - 1, axes):
                ranges[-1] = (ranges[-1][0], low + stop)
            else:
                ranges.append((low + start, low + stop))
            before = (i, axes)
    return counted_parts


def sums_of_squares(gradient: torch.Tensor, parts: Parts) -> Squares:
    """Sums of squares of the parts of [n] `gradient`, in float32 at least, where it is."""
    dtype, squares = wide(gradient.dtype), Squares()
    for axes, ranges in parts.items():
        norms = torch._foreach_norm([gradient[low:high] for low, high in ranges], 2, dtype=dtype)
        squares[axes] = norms[0].square() if len(norms) == 1 else torch.stack(norms).square().sum()
    return squares
