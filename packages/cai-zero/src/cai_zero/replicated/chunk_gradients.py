"""The gradients of a chunk: accumulated, reduced into this rank's shard, and settled for the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.gradients import GradBuffer, set_raw_grad
from cai_mesh.layout import ReduceSpec
from cai_zero.reduction.ranks import DataRanks
from cai_zero.reduction.reducer import Reducible


@dataclass(eq=False)
class ChunkGradients:
    """One chunk's gradients, from the first backward until the loop drops them: further ones, after steps too, add up.

    Args:
        params: the parameters; others count them by their places here.
        ranges: each one's part of a shard.
        flat: this rank's shard of the master weights; its `.grad` is that of the coming step, once settled.
        units: modules whose backward gives the gradients.
        buffer: the memory they accumulate in until they are reduced.
        spec, ranks: the ranks over which they are summed.
        reduced: this rank's shard of the gradient, summed over the reductions since it was dropped.
        dropped: parameters whose gradients in `reduced` have been dropped since.
        absent: parameters without a gradient, on any rank; None until the ranks have agreed.
        ready: units whose gradients of this pass are complete.
        collected: whether all gradients of this pass are in `buffer`.
        pending: whether a pass has ended without a reduction; alike on all ranks, whatever they have used.
    """

    params: Sequence[nn.Parameter]
    ranges: Sequence[slice]
    flat: nn.Parameter
    units: set[nn.Module]
    buffer: GradBuffer
    spec: ReduceSpec
    ranks: DataRanks
    reduced: torch.Tensor | None = None
    dropped: set[int] = field(default_factory=set)
    absent: set[int] | None = None
    ready: set[nn.Module] = field(default_factory=set)
    collected: bool = False
    pending: bool = False

    def __post_init__(self) -> None:
        self.reducible = Reducible(self.buffer, self.spec, self.ranks, self._add_reduced)

    # -- a pass --------------------------------------------------------------------------------------------------

    def end_unit(self, unit: nn.Module) -> bool:
        """Count a unit whose gradients of this pass are complete; whether those of all units are."""
        self.ready.add(unit)
        return self.ready == self.units

    def collect(self) -> None:
        """Have the gradients of this pass in the buffer."""
        self.buffer.collect()
        self.collected = True

    def end_pass(self) -> None:
        """Forget the units of the pass."""
        self.collected = False
        self.ready.clear()

    # -- a step --------------------------------------------------------------------------------------------------

    @property
    def unreduced(self) -> bool:
        """Whether a reduction is still needed before the gradient of the step is complete."""
        return self.pending or self.reduced is None or self.buffer.has_gradients

    def _add_reduced(self, grad_shard: torch.Tensor) -> None:
        self.pending, self.absent = False, None
        total = self.reduced if self.flat.grad is None else self.flat.grad
        self.flat.grad = None
        if total is None:
            self.reduced = grad_shard
            return
        self.reduced = total
        self.clear_dropped()
        self.reduced = total.to(grad_shard.dtype).add_(grad_shard)

    def settle(self, absent: set[int]) -> None:
        """Complete the gradient of the coming step; `absent` have none."""
        assert self.reduced is not None
        self.clear_dropped()
        if self.flat.grad is None:
            self.flat.grad = self.reduced.to(self.flat.dtype)
        # else nothing has come since it was settled last, but it may have been clipped
        self.absent = absent

    def part(self, index: int) -> torch.Tensor | None:
        """This rank's part of the settled gradient of one parameter; None where no rank has a gradient."""
        assert self.flat.grad is not None and self.absent is not None
        return None if index in self.absent else self.flat.grad[self.ranges[index]]

    def clear_dropped(self) -> None:
        """Let what has been dropped count no more, in what is added up and in norms."""
        for total in (self.reduced, self.flat.grad):
            if total is not None:
                for i in self.dropped:
                    total[self.ranges[i]].zero_()
        self.dropped.clear()

    def drop(self, index: int) -> None:
        """Forget the gradient of one parameter, reduced or not."""
        self.buffer.drop(index)
        if self.reduced is not None:
            self.dropped.add(index)
        if self.absent is not None:
            self.absent.add(index)

    def put(self, index: int, part: torch.Tensor) -> None:
        """Take another part for the settled gradient of one parameter."""
        assert self.flat.grad is not None and self.absent is not None
        current = self.flat.grad[self.ranges[index]]
        if current.data_ptr() != part.data_ptr():
            current.copy_(part)
        self.dropped.discard(index)
        self.absent.discard(index)
        self.buffer.arrived.add(index)

    def zero(self) -> None:
        """Let every gradient that there is be zero. Those that have arrived, reduced or not, are there still."""
        self.clear_dropped()
        for total in (self.reduced, self.flat.grad):
            if total is not None:
                total.zero_()
        self.buffer.arrived |= self.buffer.written
        self.buffer.close()
        for param in self.params:
            set_raw_grad(param, None)

    def forget(self) -> None:
        """Drop every gradient, reduced or not."""
        self.flat.grad = self.reduced = self.absent = None
        self.pending = False
        self.dropped.clear()
        self.buffer.forget()
