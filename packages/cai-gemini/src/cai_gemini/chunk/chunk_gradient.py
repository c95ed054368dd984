"""The gradient of a chunk: where it gathers, its way to the host, and what users read, put and drop of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from typing import Protocol

import torch
from torch import nn

from cai_gemini.chunk.gradient import Gradient, Parts, Squares, counted, sums_of_squares
from cai_gemini.chunk.unit import Unit
from cai_gemini.memory.copies import Copied, Copies
from cai_gemini.memory.ledger import Ledger
from cai_gemini.memory.worker import Worker
from cai_gemini.planning.policy import Sizes
from cai_mesh.gradients import GradBuffer, in_backward, raw_grad, set_raw_grad


class Shared(Protocol):
    """What the chunks of a model share."""

    copies: Copies
    worker: Worker
    ledger: Ledger

    def make_room(self) -> None:
        """Called before a gradient takes device memory that will go to the host."""


class ChunkGradient(abc.ABC):
    """What an `OffloadedChunk` knows of its gradient.

    Args:
        unit: the chunk, or a rank's shard of it.
        gradients: dtype of those that are received; None while it is frozen.
        shared: what all chunks of a model have in common.

    Attributes:
        buffer: where gradients accumulate, if they are collected from there.
        gradient: the one of the coming step.
        touched: parameters that have one.
        on_device: whether master weights and optimizer state, and so gradients, stay on the device.
        streamed: whether master weights and state, on the host, are stepped on the device piece by piece.
    """

    def __init__(self, unit: Unit, gradients: torch.dtype | None, shared: Shared):
        self.unit, self.name = unit, unit.chunk.names[0]
        self.copies, self.worker, self._ledger = shared.copies, shared.worker, shared.ledger
        self._make_room = shared.make_room
        self.on_device = self.streamed = False
        self.buffer: GradBuffer | None = None
        self.gradient_dtype, self._summed = gradients, False  # of several backwards
        self._parts: Parts | None = None  # of the gradient, that count in its norm
        self.gradient: Gradient | None = None
        self.touched: set[int] = set()

    @property
    @abc.abstractmethod
    def sizes(self) -> Sizes:
        """Bytes of the chunk's parts, for those that are on the device."""

    @property
    @abc.abstractmethod
    def members(self) -> set[int]:
        """Places of the parameters that the optimizer has."""

    def expect_gradient(self) -> None:
        """A gradient takes device memory: wait until there is room for one that will go to the host."""
        if not self.on_device:
            self._make_room()
            self._ledger.change("gradients", self.sizes.gradients)

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
        before = self.gradient
        if before is not None:
            self._clear_dropped(before)
        self.touched.update(i for i in touched if self.unit.kept[i].requires_grad)
        squares = sums_of_squares(arrived, self._counted()) if before is None else None
        self._summed = self._summed or before is not None
        landed, sent = arrived, None
        if not self.on_device:
            landed = self.copies.host.take(arrived.numel(), arrived.dtype)
            sent = self.copies.to_host(landed, arrived, name=self.name)
        if before is None:
            self.gradient = Gradient(landed, sent, squares)
        else:
            before.add(landed, sent, self.worker, self.copies.host, copies=self.streamed)
        return sent

    def _clear_dropped(self, gradient: Gradient) -> None:
        """What somebody has dropped counts no more when another backward adds to it."""
        for index in set(range(len(self.unit.kept))) - self.touched:
            low, high = self.unit.ranges[index]
            gradient.settled()[low:high].zero_()

    def gradient_of(self, index: int) -> torch.Tensor | None:
        """The gradient of parameter `index`, complete, as a view; what is written there is stepped with."""
        self.absorb()
        if index not in self.touched or self.gradient is None:
            return None
        low, high = self.unit.ranges[index]
        view = self.gradient.settled()[low:high]
        self.gradient.squares = None  # what is written to the view is not seen here
        self.unit.kept[index].grad_dtype = view.dtype  # type: ignore[attr-defined]
        return view

    @torch.no_grad()
    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Put another gradient, or none, in place of parameter `index`'s."""
        with torch._C.DisableTorchFunctionSubclass():
            set_raw_grad(self.unit.kept[index], None)
        if self.buffer is not None:
            self.buffer.drop(index)
        if gradient is None:
            self.touched.discard(index)
            if not self.touched:
                self.drop_gradient()
            return
        if self.gradient is None:
            shard = self.unit.shard
            zeros = torch.zeros(shard.numel(), dtype=shard.dtype, device=shard.device)
            self.gradient = Gradient(zeros, None, None)
        low, high = self.unit.ranges[index]
        self.gradient.settled()[low:high].copy_(gradient.flatten())
        self.gradient.squares = None
        self.touched.add(index)

    def leaf(self, index: int) -> nn.Parameter:
        """The parameter that autograd accumulates into, where hooks belong."""
        return self.unit.used[index]

    @torch.no_grad()
    def absorb(self) -> None:
        """Take what came past `collect`: to the kept parameters (a loss that reads weights), by a broken backward."""
        if self.buffer is not None and not in_backward() and self.buffer.has_gradients:
            sent = self.collect()
            if sent is not None:
                sent.synchronize()
                self._ledger.change("gradients", -self.sizes.gradients)
        for index, param in enumerate(self.unit.kept):
            with torch._C.DisableTorchFunctionSubclass():
                direct = raw_grad(param)
                set_raw_grad(param, None)
            if direct is None:
                continue
            low, high = self.unit.ranges[index]
            if self.gradient is not None and index in self.touched:
                direct = direct + self.gradient.settled()[low:high]
            self.set_gradient(index, direct)

    def drop_own(self) -> None:
        """Forget the gradients of what the optimizer has; those of other parameters are somebody else's."""
        own = self.members
        if len(own) == len(self.unit.kept):
            self.drop_gradient()
        for index in own if len(own) < len(self.unit.kept) else ():
            self.set_gradient(index, None)

    def drop_gradient(self) -> None:
        """Forget the gradient, and what a backward that raised has left of one."""
        if self.gradient is not None:
            self.copies.host.give(self.gradient.settled())
        self.gradient = None
        self.touched.clear()
        if self.buffer is None:
            return
        for param in (*self.buffer.params, *self.unit.kept):
            with torch._C.DisableTorchFunctionSubclass():
                set_raw_grad(param, None)
        if self.buffer.is_open:
            self.buffer.close()
            if not self.on_device:
                self._ledger.change("gradients", -self.sizes.gradients)

    @torch.no_grad()
    def squares(self) -> Squares:
        """Sums of the gradient's squares by mesh axes, where they were taken: on the device after one backward."""
        self.absorb()
        if self.gradient is None or not self.touched:
            return {}
        if self.gradient.squares is not None and len(self.touched) == len(self.unit.kept):
            return self.gradient.squares
        return sums_of_squares(self.gradient.settled(), counted(self.unit, sorted(self.touched)))

    def _counted(self) -> Parts:
        if self._parts is None:
            self._parts = counted(self.unit, range(len(self.unit.kept)))
        return self._parts

    def _copies(self, indices: Iterable[int]) -> dict[int, torch.Tensor]:
        """Gradients of parameters that the optimizer does not have: they are not consumed by its step."""
        held = self.gradient
        ranges = {i: slice(*self.unit.ranges[i]) for i in indices}
        return {i: held.settled()[part].clone() for i, part in ranges.items()} if held is not None else {}
