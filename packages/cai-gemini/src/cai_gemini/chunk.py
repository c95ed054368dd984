"""One chunk of an offloaded model: its weights on device and host, its gradient and its step."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Protocol

import torch
from torch import nn

from cai_gemini.chunk_step import ChunkStep, Groups
from cai_gemini.copies import Copied, Copies, Scalar, there
from cai_gemini.disk_state import DiskState
from cai_gemini.disk_weights import DiskWeights, Staging
from cai_gemini.gradient import Gradient, Parts, Squares, counted, sums_of_squares, wide
from cai_gemini.host_weights import HostWeights
from cai_gemini.nvme import NvmeStore, Region
from cai_gemini.parameter import KeptParameter
from cai_gemini.policy import Sizes
from cai_gemini.states import Event, Ledger, State, follow
from cai_gemini.timeline import host_span
from cai_gemini.unit import Unit
from cai_gemini.worker import Worker
from cai_mesh.gradients import GradBuffer, in_backward, raw_grad, set_raw_grad

Taken = tuple[Gradient, Groups, ChunkStep]


class Shared(Protocol):
    """What the chunks of a model share."""

    copies: Copies
    worker: Worker
    ledger: Ledger

    def make_room(self) -> None:
        """Called before a gradient takes device memory that will go to the host."""


class OffloadedChunk:
    """A chunk and where its parts are.

    In host memory are master weights and optimizer state, unless they stay on the device; the host weights, in the
    dtype of computation, which are copied to the device; and the gradient that came back. All but the gradient may be
    on a disk instead.

    Args:
        unit: the chunk, or a rank's shard of it; `unit.shard` is the master weights.
        gradients: dtype of those that are received; None for a frozen chunk.
        shared: what all chunks of a model have in common.

    Attributes:
        buffer: where gradients accumulate, if they are collected from there.
        in_flight: whether the weights were fetched and not released yet: they may not be freed.
        streamed: whether master weights and state, on the host, are stepped on the device piece by piece.
    """

    def __init__(self, unit: Unit, gradients: torch.dtype | None, shared: Shared):
        self.unit = unit
        self.step: ChunkStep | None = None
        self.name = unit.chunk.names[0]
        self.copies, self.worker, self._ledger = shared.copies, shared.worker, shared.ledger
        self._make_room = shared.make_room
        self.disk: DiskState | None = None
        self.state, self.on_device = State.FREE, False  # on_device: master weights and optimizer state
        self.stays = self.in_flight = self.streamed = False
        self.host_weights = HostWeights(unit, self.copies)
        self._stepping: Future[None] | None = None
        self._writing: Future[None] | None = None
        self._coming: Future[Copied] | None = None
        self.buffer: GradBuffer | None = None
        self.gradient_dtype, self._summed = gradients, False  # of several backwards
        self._parts: Parts | None = None  # of the gradient, that count in its norm
        self.gradient: Gradient | None = None
        self.touched: set[int] = set()  # parameters that have a gradient
        for index, param in enumerate(unit.kept):
            KeptParameter.adopt(param, self, index)

    def prepare(self, step: ChunkStep) -> None:
        """Take what steps the chunk, once the optimizer holds its parameters."""
        self.step = step if self.trains else None
        if self.disk is not None and self.step is not None:
            self.disk.adopt_state(self.step)

    @property
    def trains(self) -> bool:
        """Whether it gets gradients."""
        return self.gradient_dtype is not None

    @property
    def in_use(self) -> bool:
        """Whether its weights may not be freed now."""
        return self.in_flight or self.state is State.COMPUTE

    def to_disk(self, store: NvmeStore, staging: Staging | None) -> None:
        """Keep master weights, and state once there is some, on a disk; with `staging`, the weights to copy as well."""
        self.disk = DiskState(self.name, self.unit, self.host_weights, store)
        if staging is not None:
            self.host_weights.to_disk(
                DiskWeights(self.name, self.host_weights.tensor, self.disk.master, store, staging)
            )

    @property
    def sizes(self) -> Sizes:
        """Bytes of its parts, for those that are on the device."""
        numel = self.unit.shard.numel()
        weights = numel * self.unit.weights.element_size()
        if self.gradient_dtype is None:
            return Sizes(weights, 0, 0)
        state = self.step.state_bytes if self.step is not None else 0
        sums = numel * wide(self.gradient_dtype).itemsize if self._summed else 0
        return Sizes(weights, numel * self.gradient_dtype.itemsize, state, sums)

    def _happens(self, event: Event) -> None:
        self.state = follow(self.state, event, self.name)

    # -- weights -------------------------------------------------------------------------------------------------

    def bring(self) -> None:
        """Begin to copy the weights to the device, after the step that is under way, if there is one."""
        self._happens(Event.BRING)
        self._ledger.change("weights", self.sizes.weights)
        self.unit.allocate_storage()
        self._copy_when_stepped()

    def _copy_when_stepped(self, *, there: bool = False) -> None:
        coming: Future[Copied] = Future()
        free = self.copies.mark()

        def copy(stepped: Future[None] | None = None) -> None:
            try:
                if stepped is not None:
                    stepped.result()
                if there:
                    coming.set_result(Copied(None))
                    return
                self.host_weights.refresh()
                self.host_weights.send(free, coming, self.name)
            except BaseException as error:
                coming.set_exception(error)

        self._coming = coming
        if self._stepping is None:
            copy()
        else:
            self._stepping.add_done_callback(copy)

    def show_writes(self) -> None:
        """Where somebody has written to the master weights, copy them to the host weights and to the device."""
        if self.host_weights.is_old:
            self.host_weights.refresh()
            self._renew()

    @property
    def version(self) -> int:
        """A number that is another one after every step, also one under way, and every write to the master weights."""
        return self.host_weights.version(under_way=self._stepping is not None and not self._stepping.done())

    def arrive(self) -> None:
        """Return with the weights usable by the compute stream."""
        if self.state is State.COMING:
            assert self._coming is not None
            self._coming.result().wait()
            self._coming = None
            self._happens(Event.ARRIVED)

    def use(self) -> None:
        """Let the modules see the weights, which have arrived."""
        self.finish_step()
        if self.host_weights.is_old and self.state is not State.COMPUTE:
            self._renew()
            self.arrive()
        self._happens(Event.USE)
        if not self.unit.is_in_use:
            self.unit.swap_in()

    def forward_over(self) -> None:
        if self.state is State.COMPUTE:
            self._happens(Event.FORWARD_OVER)
            self.unit.hide()

    def backward_over(self) -> None:
        if self.state is not State.COMING:
            self._happens(Event.BACKWARD_OVER)
            self.unit.hide()

    def free(self) -> None:
        """Drop the weights from the device."""
        self.arrive()
        self._happens(Event.FREED)
        self._ledger.change("weights", -self.sizes.weights)
        self.unit.free_storage()

    def _renew(self, *, there: bool = False) -> None:
        """Replace the weights on the device, which are old, after the step under way.

        there: that step writes them to the device itself.
        """
        self.arrive()
        self._happens(Event.RENEWED)
        if self.state is State.COMING:
            if self.on_device:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    self.unit.weights.copy_(self.unit.shard)
                self.host_weights.adopt(changed=True)
                self._coming = Future()
                self._coming.set_result(Copied(None))
            else:
                self._copy_when_stepped(there=there)

    # -- gradient ------------------------------------------------------------------------------------------------

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

    # -- step ----------------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Return once the master weights are in memory, as the last step has left them. Raises what it raised."""
        self.finish_writing()
        if self.disk is not None:
            self.disk.load()

    def unload(self) -> None:
        """Write what somebody has changed of what is on a disk, and let go of what was loaded."""
        if self.disk is not None:
            if self.disk.is_changed:
                self.show_writes()
            self.disk.unload()

    def finish_step(self) -> None:
        """Return once the last step is done."""
        stepping = self._stepping
        if stepping is not None:
            stepping.result()
            self._stepping = None

    def finish_writing(self) -> None:
        """Return once the last step is on the disk, too. Raises what that raised."""
        self.finish_step()
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def begin_step(self, scale: float | Scalar) -> None:
        """Step with the gradient, which is consumed: at once on the device, in the background on the host."""
        taken = self.take_gradient()
        if taken is None:
            return
        gradient, groups, step = taken
        if self.on_device:
            step.run(groups, gradient.tensor, there(scale), self.unit.weights.data)
            self.host_weights.adopt()
            return

        def run() -> None:
            ready, factor = gradient.settled(), float(scale)
            self.host_weights.wait_until_read()
            self.host_weights.refresh()
            with host_span(self.copies.recorder, self.name):
                step.run(groups, ready, factor, self.host_weights.tensor)
            self.host_weights.adopt()
            self.copies.host.give(ready)

        self.stepped_by(self.worker.submit(run))

    def disk_regions(self) -> list[Region]:
        """What a step reads and writes: master weights, state, and the weights where they are apart."""
        assert self.disk is not None
        return self.disk.regions + self.host_weights.regions

    def take_gradient(self) -> Taken | None:
        """The gradient, which is consumed, and what steps with it; None where there is none.

        Returns once the last step is done, and raises what that raised.
        """
        self.absorb()
        if self.step is None or self.gradient is None or not self.touched:
            return None
        self.finish_writing()
        taken = (self.gradient, self.step.groups(self.touched), self.step)
        self.host_weights.changes += 1
        self.gradient = None
        self.touched.clear()
        return taken

    def stepped_by(
        self, stepping: Future[None], also: Future[None] | None = None, *, there: bool = False
    ) -> None:
        """The step is under way.

        Args:
            also: what must have ended before the next one begins.
            there: it writes new weights to the device, too, where they stay.
        """
        self._stepping, self._writing = stepping, also
        if self.stays:
            self._renew(there=there)

    # -- moving --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def move_to_device(self) -> None:
        """Let master weights, optimizer state and gradients live on the device from now on; the weights stay."""
        assert self.step is not None
        self.settle()
        self.show_writes()
        self.arrive()
        self.disk = self.host_weights.disk = None
        device = self.copies.device
        sizes = self.sizes
        self._ledger.change("state", sizes.state)
        self._ledger.change("gradients", max(sizes.gradients, sizes.sums))
        with torch._C.DisableTorchFunctionSubclass():
            self.unit.move_shard(self.unit.shard.to(device, copy=True))
        self.host_weights.adopt()
        self.step.move_state(device)
        if self.gradient is not None:
            self.gradient = Gradient(self.gradient.settled().to(device), None, self.gradient.squares)
        self.on_device = self.stays = True
