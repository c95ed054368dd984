"""The gradients over all chunks: a state machine, from the first backward until a loop drops them.

There are no gradients (`empty`); some, still to be reduced or agreed on (`open`); or all of them, alike on all ranks
(`settled`). Backwards and gradients that a loop puts in place open it, `finish` settles it, `forget` empties it. A step
leaves it as it is: a further backward adds to what is there, a further step is taken with the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

import torch
from torch import nn

from cai_mesh.gradients import GradBuffer
from cai_mesh.storage import LifecycleListener
from cai_zero.reduction.arrivals import absent
from cai_zero.reduction.compression import Compression
from cai_zero.reduction.ranks import RankTable
from cai_zero.reduction.reducer import GradReducer
from cai_zero.replicated.chunks import Chunk, reduction_order

Phase = Literal["empty", "open", "settled"]


class StepGradients(LifecycleListener):
    """Reduces the gradients of chunks while backwards run, and settles them for a step.

    Args:
        ranks: the ranks that share the chunks.
        device: the gradients' device.
        compression: the form in which gradients travel.
        listens: whether the lifecycle of a model tells of backwards; without a model the buffers are looked at.
    """

    def __init__(self, ranks: RankTable, device: torch.device, compression: Compression, *, listens: bool):
        self._ranks, self._listens = ranks, listens
        self._reducer: GradReducer[Chunk] = GradReducer(device, compression)
        self._chunks: Sequence[Chunk] = ()
        self._chunks_of: dict[nn.Module, list[Chunk]] = {}
        self._phase: Phase = "empty"
        self._in_backward, self._backwards = False, 0  # of this step, that reduce
        self._stepped = False  # with what there is now

    def take(
        self,
        chunks: Sequence[Chunk],
        added: Sequence[Chunk],
        units: Sequence[nn.Module],
        model: nn.Module | None,
    ) -> None:
        """Follow `chunks`, of which `added` are new, over `units` in the order of forward."""
        self._chunks = chunks
        self._chunks_of = {
            unit: [chunk for chunk in chunks if unit in chunk.gradients.units] for unit in units
        }
        order = reduction_order(chunks, units, model)
        self._reducer.take({chunk: [chunk.gradients.reducible] for chunk in chunks}, order)
        if self._phase == "settled" or any(chunk.gradients.buffer.has_gradients for chunk in added):
            self.reopen()

    # -- what others ask -----------------------------------------------------------------------------------------

    @property
    def buffers(self) -> list[GradBuffer]:
        """The buffers in which gradients of chunks accumulate."""
        return [chunk.gradients.buffer for chunk in self._chunks]

    @property
    def order(self) -> Sequence[Chunk]:
        """The chunks as they reduce: tied ones, which wait for `finish`, are left out."""
        return self._reducer.order

    @property
    def tied(self) -> list[Chunk]:
        """The chunks that other stages hold too."""
        return [chunk for chunk in self._chunks if chunk.gradients.reducible.tied]

    def chunks_of(self, unit: nn.Module) -> Sequence[Chunk]:
        """The chunks that have parameters of a unit; none of a pipeline stage where nothing is trained."""
        return self._chunks_of.get(unit, ())

    def make_room(self) -> None:
        """Wait until another buffer may take memory."""
        self._reducer.make_room()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate unsharded gradients and communicate none, in every stage."""
        return self._reducer.no_sync()

    # -- while backward runs -------------------------------------------------------------------------------------

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        if backward:
            self.reopen()
            self._begin_backward()
        else:
            self._end_pass()  # an earlier backward may have raised

    def _begin_backward(self) -> None:
        """Ranks that run several backwards a step run as many."""
        if not self._in_backward and not self._reducer.silent:
            self._in_backward = True
            self._backwards += 1
            if self._backwards > 1:
                self._ranks.turns.take(f"backward {self._backwards} of a step")

    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self.chunks_of(unit):
            if chunk.gradients.end_unit(unit):
                chunk.gradients.collect()
                self._reducer.ready(chunk)

    def backward_done(self) -> None:
        for chunk in self._chunks:
            if not chunk.gradients.collected:
                chunk.gradients.buffer.collect()
        self._reducer.end_backward()
        self.reopen()
        for chunk in self._chunks:
            if self._reducer.silent or chunk.gradients.reducible.tied:
                chunk.gradients.pending = True
        self._end_pass()

    def _end_pass(self) -> None:
        self._in_backward = False
        for chunk in self._chunks:
            chunk.gradients.end_pass()
        self._reducer.reset()

    # -- from phase to phase -------------------------------------------------------------------------------------

    def has_gradients(self) -> bool:
        """Whether anything has arrived since the gradients were last dropped, as far as this rank knows."""
        if not self._listens and any(buffer.has_gradients for buffer in self.buffers):
            self.reopen()
        return self._phase != "empty"

    def reopen(self) -> None:
        """Take note of a gradient of this rank that is still to be reduced."""
        self._phase, self._stepped = "open", False

    def finish(self) -> None:
        """Reduce what is pending (a last backward under `defer`, tied parameters, a loop without a model) and wait."""
        self._ranks.turns.take("the end of a step's backwards, or a look at its gradients")
        for chunk in (*self._reducer.order, *self.tied):
            if chunk.gradients.unreduced:
                self._reducer.reduce_one(chunk.gradients.reducible)
        self._end_pass()
        missing = absent(self.buffers, self._ranks.of())
        for i, chunk in enumerate(self._chunks):
            chunk.gradients.settle({j for k, j in missing if k == i})
        self._phase = "settled"

    def settle(self) -> None:
        """Return with the gradients of the coming step complete. Collective, unless they are already."""
        if not self.has_gradients() or self._phase != "settled":
            self.finish()
        for chunk in self._chunks:
            chunk.gradients.clear_dropped()

    def settle_for_step(self) -> None:
        """Settle them for a step, which all ranks take, also where it is one more with the same."""
        if self._stepped:
            self._ranks.turns.take("one more step with the same gradients")
        self.settle()
        self._stepped, self._backwards = True, 0

    def zero(self) -> None:
        """Let every gradient that there is be zero."""
        if not self.has_gradients():
            return
        self._end_pass()
        self._stepped, self._backwards = False, 0
        for chunk in self._chunks:
            chunk.gradients.zero()

    def forget(self) -> None:
        """Drop every gradient, reduced or not."""
        self._end_pass()
        self._phase, self._stepped, self._backwards = "empty", False, 0
        for chunk in self._chunks:
            chunk.gradients.forget()
