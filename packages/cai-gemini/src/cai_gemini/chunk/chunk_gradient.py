"""The gradient of a chunk: where it gathers, its way to the host, and what users read, put and drop of it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Protocol

import torch

from cai_gemini.chunk.given_back import GivenBack, given_back
from cai_gemini.chunk.gradient import Gradient, Parts, Squares, counted, sums_of_squares, wide
from cai_gemini.chunk.unit import Unit
from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.ledger import Ledger
from cai_gemini.memory.worker import Worker
from cai_gemini.planning.policy import StepPlace
from cai_mesh.gradients import GradBuffer, in_backward, raw_grad, set_raw_grad


class Shared(Protocol):
    """The parts that the chunks of a model share."""

    copies: Copies
    worker: Worker
    ledger: Ledger

    def make_room(self) -> None:
        """Called before a gradient takes device memory that will go to the host."""


class ChunkGradient:
    """The gradient of one chunk, from the backward that makes it to the step that consumes it.

    Args:
        unit: the chunk, or a rank's shard of it.
        dtype: dtype of the gradients that are received; None while the chunk is frozen.
        shared: the parts that all chunks of a model have in common.
        place: says where the chunk is stepped; there its gradient goes.

    Attributes:
        buffer: the buffer where gradients accumulate, if they are collected from there.
        gradient: the one of the coming step.
        touched: parameters that have one.
        consumed: those whose gradient a step has consumed and nobody has cleared since.
    """

    def __init__(self, unit: Unit, dtype: torch.dtype | None, shared: Shared, place: Callable[[], StepPlace]):
        self._unit, self.dtype, self._place = unit, dtype, place
        self._copies, self._worker, self._ledger = shared.copies, shared.worker, shared.ledger
        self._make_room = shared.make_room
        self.buffer: GradBuffer | None = None
        self._summed = False  # of several backwards
        self._parts: Parts | None = None  # of the gradient, that count in its norm
        self.gradient: Gradient | None = None
        self.touched: set[int] = set()
        self.consumed: set[int] = set()

    @property
    def nbytes(self) -> int:
        """Bytes of the gradient of one backward."""
        return self._unit.shard.numel() * self.dtype.itemsize if self.dtype is not None else 0

    @property
    def sum_bytes(self) -> int:
        """Bytes of the sum of several backwards; 0 where a step has only one."""
        if self.dtype is None or not self._summed:
            return 0
        return self._unit.shard.numel() * wide(self.dtype).itemsize

    @property
    def _stays(self) -> bool:
        """Whether it stays on the device."""
        return self._place() is StepPlace.DEVICE

    def expect(self) -> None:
        """Wait until there is room on the device for a gradient that will go to the host, and count it there."""
        if not self._stays:
            self._make_room()
            self._ledger.change("gradients", self.nbytes)

    @torch.no_grad()
    def collect(self) -> Copied | None:
        """Take the gradient of a backward; returns its copy to the host, if it goes there."""
        assert self.buffer is not None
        if not self.buffer.has_gradients:
            return None
        touched = self.buffer.written
        self.buffer.take()
        return self.receive(self.buffer.hand_over(), touched)

    @torch.no_grad()
    def receive(self, arrived: torch.Tensor, touched: Iterable[int]) -> Copied | None:
        """Take a gradient of the parameters `touched`; returns its copy to the host, if it goes there.

        Args:
            arrived: [n] on the device, laid out as the shard, written by the current stream. It is kept.
        """
        self.check_cleared()
        before = self.gradient
        if before is not None:
            self._clear_dropped(before)
        self.touched.update(i for i in touched if self._unit.kept[i].requires_grad)
        squares = sums_of_squares(arrived, self._counted()) if before is None else None
        self._summed = self._summed or before is not None
        landed, sent = arrived, None
        if not self._stays:
            landed = self._copies.host.take(arrived.numel(), arrived.dtype)
            sent = self._copies.to_host(landed, arrived, name=self._unit.chunk.names[0])
        if before is None:
            self.gradient = Gradient(landed, sent, squares)
        else:
            streamed = self._place() is StepPlace.STREAMED
            before.add(landed, sent, self._worker, self._copies.host, copies=streamed)
        return sent

    def _clear_dropped(self, gradient: Gradient) -> None:
        """Forget gradients that somebody has dropped, before another backward adds to them."""
        for index in set(range(len(self._unit.kept))) - self.touched:
            low, high = self._unit.ranges[index]
            gradient.settled()[low:high].zero_()

    def check_cleared(self) -> None:
        """Raise `PlanError` where a step has consumed gradients that nobody has cleared since."""
        if self.consumed:
            raise given_back(self._unit.chunk.names[min(self.consumed)])

    def part(self, index: int) -> torch.Tensor | None:
        """The gradient of parameter `index`, complete, as a view; what is written there is stepped with.

        One that a step has consumed is shown as such: its values raise. Collective where ranks have yet to agree.
        """
        if not in_backward():
            self._unit.complete()
        self.absorb()
        if index in self.consumed:
            return self._given_back(index)
        if index not in self.touched or self.gradient is None:
            return None
        low, high = self._unit.ranges[index]
        view = self.gradient.settled()[low:high]
        self.gradient.squares = None  # what is written to the view is not seen here
        self._unit.kept[index].grad_dtype = view.dtype  # type: ignore[attr-defined]
        return view

    @torch.no_grad()
    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Put another gradient, or none, in place of parameter `index`'s."""
        with torch._C.DisableTorchFunctionSubclass():
            set_raw_grad(self._unit.kept[index], None)
        if self.buffer is not None:
            self.buffer.drop(index)
        self.consumed.discard(index)
        if isinstance(gradient, GivenBack):
            self.consumed.add(index)
            gradient = None
        if self._unit.unreduced is not None:
            self._unit.unreduced.drop(index)
            self._unit.unreduced.arrived |= {index} if gradient is not None else set()
        if gradient is None:
            self.touched.discard(index)
            if not self.touched:
                self._free()
            return
        if self.gradient is None:
            shard = self._unit.shard
            zeros = torch.zeros(shard.numel(), dtype=shard.dtype, device=shard.device)
            self.gradient = Gradient(zeros, None, None)
        low, high = self._unit.ranges[index]
        self.gradient.settled()[low:high].copy_(gradient.flatten())
        self.gradient.squares = None
        self.touched.add(index)

    @torch.no_grad()
    def absorb(self) -> None:
        """Take what came past `collect`: to the kept parameters (a loss that reads weights), by a broken backward."""
        if self.buffer is not None and not in_backward() and self.buffer.has_gradients:
            sent = self.collect()
            if sent is not None:
                sent.synchronize()
                self._ledger.change("gradients", -self.nbytes)
        for index, param in enumerate(self._unit.kept):
            with torch._C.DisableTorchFunctionSubclass():
                direct = raw_grad(param)
                set_raw_grad(param, None)
            if direct is None:
                continue
            self.check_cleared()
            low, high = self._unit.ranges[index]
            if self.gradient is not None and index in self.touched:
                direct = direct + self.gradient.settled()[low:high]
            self.put(index, direct)

    def drop_members(self, members: Collection[int]) -> None:
        """Forget the gradients of the optimizer's parameters; those of others are somebody else's."""
        if len(members) == len(self._unit.kept):
            self.drop()
        for index in members if len(members) < len(self._unit.kept) else ():
            self.put(index, None)

    def zero_members(self, members: Collection[int]) -> None:
        """Let those gradients of the optimizer's parameters that there are be zero, also what a step has consumed."""
        self.absorb()
        for index in sorted((self.touched | self.consumed).intersection(members)):
            self._zero(index)

    def _zero(self, index: int) -> None:
        low, high = self._unit.ranges[index]
        self.put(index, torch.zeros(high - low, dtype=self._unit.shard.dtype))

    def _given_back(self, index: int) -> torch.Tensor:
        like, weak = self._unit.shard, weakref.ref(self)
        name, shape = self._unit.chunk.names[index], self._unit.used[index].shape

        def zero() -> None:
            gradient = weak()
            if gradient is not None:
                gradient._zero(index)

        return GivenBack(shape, like, name, zero)

    def drop(self) -> None:
        """Forget the gradient, and what a backward that raised has left of one."""
        self.consumed.clear()
        if self._unit.unreduced is not None:
            self._unit.unreduced.forget()
        self._free()

    def _free(self) -> None:
        if self.gradient is not None:
            self._copies.host.give(self.gradient.settled())
        self.gradient = None
        self.touched.clear()
        if self.buffer is None:
            return
        for param in (*self.buffer.params, *self._unit.kept):
            with torch._C.DisableTorchFunctionSubclass():
                set_raw_grad(param, None)
        if self.buffer.is_open:
            self.buffer.close()
            if not self._stays:
                self._ledger.change("gradients", -self.nbytes)

    @torch.no_grad()
    def squares(self) -> Squares:
        """Sums of the gradient's squares by mesh axes, where they were taken: on the device after one backward."""
        self.absorb()
        if self.gradient is None or not self.touched:
            return {}
        if self.gradient.squares is not None and len(self.touched) == len(self._unit.kept):
            return self.gradient.squares
        return sums_of_squares(self.gradient.settled(), counted(self._unit, sorted(self.touched)))

    def _counted(self) -> Parts:
        if self._parts is None:
            self._parts = counted(self._unit, range(len(self._unit.kept)))
        return self._parts

    def consume(self, members: Collection[int]) -> Gradient:
        """Give the gradient to a step of some parameters, which have none from then on; those of others stay."""
        gradient, ranges = self.gradient, self._unit.ranges
        assert gradient is not None
        rest = self.touched.difference(members)
        parts = {i: gradient.settled()[slice(*ranges[i])].clone() for i in rest}
        self.gradient = None
        self.consumed |= self.touched.intersection(members)
        self.touched.clear()
        for index, part in parts.items():
            self.put(index, part)
        return gradient

    def move(self, device: torch.device) -> None:
        """Bring the gradient, if there is one, to a device, where the next ones stay."""
        if self.gradient is not None:
            self.gradient = Gradient(self.gradient.settled().to(device), None, self.gradient.squares)
