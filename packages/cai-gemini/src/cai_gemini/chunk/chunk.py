"""One chunk of an offloaded model: its weights on device, host and disk, and the step that changes them."""

from __future__ import annotations

from concurrent.futures import Future

import torch
from torch import nn

from cai_gemini.chunk.chunk_gradient import ChunkGradient, Shared
from cai_gemini.chunk.disk_state import DiskState
from cai_gemini.chunk.disk_weights import DiskReaders, DiskWeights
from cai_gemini.chunk.gradient import Gradient
from cai_gemini.chunk.host_weights import HostWeights
from cai_gemini.chunk.optimizer_step import ChunkStep, Groups
from cai_gemini.chunk.parameter import KeptParameter
from cai_gemini.chunk.states import Event, State, follow
from cai_gemini.chunk.unit import Unit
from cai_gemini.memory.copies import Copied
from cai_gemini.nvme import NvmeStore, Region
from cai_gemini.planning.policy import Sizes, StepPlace

Taken = tuple[Gradient, Groups, ChunkStep]


class OffloadedChunk:
    """A chunk and where its parts are.

    In host memory are master weights and optimizer state, unless they stay on the device; the host weights, in the
    dtype of computation, which are copied to the device; and the gradient that came back. All but the gradient may be
    on a disk instead.

    Args:
        unit: the chunk, or a rank's shard of it; `unit.shard` is the master weights.
        gradients: dtype of those that are received; None for a frozen chunk.
        shared: the parts that all chunks of a model have in common.

    Attributes:
        gradients: the gradient, from a backward to the step.
        place: the place where the chunk is stepped.
        stays: whether the weights stay on the device between uses.
        in_flight: whether the weights were fetched and not released yet: they may not be freed.
        still: places of the parameters that have been frozen until now.
    """

    def __init__(self, unit: Unit, gradients: torch.dtype | None, shared: Shared):
        self.unit, self.name = unit, unit.chunk.names[0]
        self.copies, self.worker, self.ledger = shared.copies, shared.worker, shared.ledger
        self.place = StepPlace.HOST
        self.gradients = ChunkGradient(unit, gradients, shared, lambda: self.place)
        self._step: ChunkStep | None = None
        self.still: list[int] = []
        self.disk: DiskState | None = None
        self.state, self.stays, self.in_flight = State.FREE, False, False
        self.host_weights = HostWeights(unit, self.copies)
        self._stepping: Future[None] | None = None
        self._writing: Future[None] | None = None
        self._coming: Future[Copied] | None = None
        for index, param in enumerate(unit.kept):
            KeptParameter.adopt(param, self, index)

    def prepare(self, step: ChunkStep) -> None:
        """Take what steps the chunk, once the optimizer holds its parameters."""
        self._step = step
        if self.disk is not None and self.step is not None:
            self.disk.adopt_state(self.step)

    @property
    def step(self) -> ChunkStep | None:
        """The step of its optimizer; None while it is frozen."""
        return self._step if self.trains else None

    @property
    def members(self) -> set[int]:
        """Places of the parameters that the optimizer has."""
        return self.step.members if self.step is not None else set()

    def train(self, gradients: torch.dtype) -> None:
        """A frozen chunk is trained from now on, with gradients of this dtype."""
        self.finish_writing()
        self.unload()
        self.gradients.dtype = gradients
        if self._step is not None:
            self.prepare(self._step)

    def regroup(self) -> None:
        """The optimizer has more parameters now."""
        if self._step is not None:
            self._step.regroup()

    @property
    def trains(self) -> bool:
        """Whether it gets gradients."""
        return self.gradients.dtype is not None

    @property
    def in_use(self) -> bool:
        """Whether its weights may not be freed now."""
        return self.in_flight or self.state is State.COMPUTE

    def to_disk(self, store: NvmeStore, readers: DiskReaders | None) -> None:
        """Keep master weights, and state once there is some, on a disk; with `readers`, the weights to copy as well."""
        self.disk, self.place = DiskState(self.name, self.unit, self.host_weights, store), StepPlace.DISK
        if readers is not None:
            self.host_weights.to_disk(
                DiskWeights(self.name, self.host_weights.tensor, self.disk.master, store, readers)
            )

    @property
    def sizes(self) -> Sizes:
        """Bytes of its parts, for those that are on the device."""
        weights = self.unit.shard.numel() * self.unit.weights.element_size()
        state = self.step.state_bytes if self.step is not None else 0
        return Sizes(weights, self.gradients.nbytes, state, self.gradients.sum_bytes)

    def _happens(self, event: Event) -> None:
        self.state = follow(self.state, event, self.name)

    # -- a `Keeper` of its parameters ----------------------------------------------------------------------------

    def gradient_of(self, index: int) -> torch.Tensor | None:
        """The gradient of parameter `index`, complete, as a view; what is written there is stepped with."""
        return self.gradients.part(index)

    def set_gradient(self, index: int, gradient: torch.Tensor | None) -> None:
        """Put another gradient, or none, in place of parameter `index`'s."""
        self.gradients.put(index, gradient)

    def leaf(self, index: int) -> nn.Parameter:
        """The parameter that autograd accumulates into, where hooks belong."""
        return self.unit.used[index]

    # -- weights -------------------------------------------------------------------------------------------------

    def bring(self) -> None:
        """Begin to copy the weights to the device, after the step that is under way, if there is one."""
        self._happens(Event.BRING)
        self.ledger.change("weights", self.sizes.weights)
        self.unit.allocate_storage()
        self._copy_when_stepped()

    def _copy_when_stepped(self, *, updates_device: bool = False) -> None:
        coming: Future[Copied] = Future()
        free = self.copies.mark()

        def copy(stepped: Future[None] | None = None) -> None:
            try:
                if stepped is not None:
                    stepped.result()
                if updates_device:
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
        """Copy the master weights to the host weights and to the device, where somebody has written to them."""
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
        self.ledger.change("weights", -self.sizes.weights)
        self.unit.free_storage()

    def _renew(self, *, updates_device: bool = False) -> None:
        """Replace the weights on the device, which are old, after the step under way.

        updates_device: that step writes them to the device itself.
        """
        self.arrive()
        self._happens(Event.RENEWED)
        if self.state is State.COMING:
            if self.place is StepPlace.DEVICE:
                with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
                    self.unit.weights.copy_(self.unit.shard)
                self.host_weights.adopt(changed=True)
                self._coming = Future()
                self._coming.set_result(Copied(None))
            else:
                self._copy_when_stepped(updates_device=updates_device)

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

    def disk_regions(self) -> list[Region]:
        """The memory that a step reads and writes: master weights, state, and the weights where they are apart."""
        assert self.disk is not None
        return self.disk.regions + self.host_weights.regions

    def take_gradient(self) -> Taken | None:
        """The gradient, which is consumed, and what steps with it; None where there is none.

        Returns once the last step is done, and raises what that raised.
        """
        self.gradients.absorb()
        if self.step is None or self.gradients.gradient is None or not self.gradients.touched:
            return None
        self.finish_writing()
        stepped = self.gradients.touched & self.step.members
        if not stepped:
            return None
        gradient = self.gradients.consume(stepped)
        self.host_weights.changes += 1
        return gradient, self.step.groups(stepped), self.step

    def stepped_by(
        self, stepping: Future[None], also: Future[None] | None = None, *, updates_device: bool = False
    ) -> None:
        """The step is under way.

        Args:
            also: work that must have ended before the next one begins.
            updates_device: it writes new weights to the device, too, where they stay.
        """
        self._stepping, self._writing = stepping, also
        if self.stays:
            self._renew(updates_device=updates_device)
