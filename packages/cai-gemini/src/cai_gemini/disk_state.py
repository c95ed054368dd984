"""Master weights and optimizer state of one chunk on a disk: lent to whoever reads them, stepped where they are read.

Between uses the kept parameters have shapes and no values. Whoever reads one is lent the chunk: its master weights and
state come into memory, and stay until the next step, which writes back what was changed. Of an optimizer's state, every
tensor with as many elements as its parameter is there, in a region for all of the chunk's parameters; counters and
other small things stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from cai_gemini.chunk_step import ChunkStep, Groups
from cai_gemini.nvme import NvmeStore, Region

if TYPE_CHECKING:
    from cai_gemini.held import Held

MOMENTS = ("exp_avg", "exp_avg_sq")
Job = Callable[[list[torch.Tensor]], None]


@dataclass(eq=False)
class Slot:
    """One tensor a parameter, of a chunk's parameters.

    Args:
        region: [n]; parameters lie there as they do in the shard.
        members: the parameters that have it; what lies at others means nothing.
    """

    region: Region
    members: set[int]


class DiskState:
    """Master weights of one chunk, and what state its optimizer has, on a disk from now on.

    Args:
        held: the chunk, not stepped yet.
        store: takes the regions. Raises `NvmeError` where the disk has no room.

    Attributes:
        master: region of the master weights.
        slots: the state's, by name and dtype.
    """

    def __init__(self, held: Held, store: NvmeStore):
        self._held, self._store = held, store
        shard = held.unit.shard
        self.master = store.reserve(f"{held.name} (master weights)", shard.numel(), shard.dtype)
        self.slots: dict[tuple[str, torch.dtype], Slot] = {}
        self._flats: list[torch.Tensor] = []  # lent, in the order of slots
        self._lent: (
            list[tuple[torch.Tensor, int]] | None
        ) = []  # what is in memory, and its versions; [] once written to
        self.give_back()

    @property
    def regions(self) -> list[Region]:
        """Of master weights and state, in the order in which a step takes their tensors."""
        return [self.master, *(slot.region for slot in self.slots.values())]

    @property
    def in_memory(self) -> bool:
        """Whether it is lent."""
        return self._lent is not None

    def _nothing(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, dtype=dtype).expand(self.master.numel)

    # -- state ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt_state(self) -> None:
        """Take the optimizer's state, once the chunk is stepped by it. Adam's starts as zeros that take no writing."""
        step = self._held.step
        if step is None:
            return
        has_state = step.has_state
        if has_state:
            self.borrow()
        if step.fused:
            for name in MOMENTS:
                slot = self._slot((name, self.master.dtype), zeros=True)
                slot.members.update(range(len(self._held.unit.kept)))
        if has_state:
            self._lent = []
            self.give_back()
        elif step.fused:
            self._put([self._nothing(self.master.dtype)] * 3)

    def _slot(self, key: tuple[str, torch.dtype], *, zeros: bool = False) -> Slot:
        if key not in self.slots:
            name = f"{self._held.name} ({key[0]})"
            self.slots[key] = Slot(self._store.reserve(name, self.master.numel, key[1], zeros=zeros), set())
        return self.slots[key]

    def _found(self) -> dict[tuple[str, torch.dtype], dict[int, torch.Tensor]]:
        """The optimizer's tensors that belong on the disk, by name and dtype, by parameter."""
        step = self._held.step
        if step is None:
            return {}
        if step.fused:
            step.moments()  # there from the start, for every parameter
        return belonging({i: step.state_of(i) for i in range(len(self._held.unit.kept))}, self._held)

    def _everything(self) -> list[torch.Tensor]:
        """Everything that is lent, as it is now."""
        found = self._found()
        return [
            self._held.unit.shard,
            *self._held.unit.kept,
            *(tensor for tensors in found.values() for _, tensor in sorted(tensors.items())),
        ]

    def _changed(self) -> bool:
        assert self._lent is not None
        with torch._C.DisableTorchFunctionSubclass():
            now = self._everything()
            return len(now) != len(self._lent) or any(
                a is not b or a._version != version for a, (b, version) in zip(now, self._lent, strict=True)
            )

    # -- lending -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def borrow(self) -> None:
        """Bring all of it into memory, unless it is there."""
        if self._lent is not None:
            return
        buffers = [self._store.buffer(region.numel, region.dtype) for region in self.regions]
        reads = [self._store.read(region, out) for region, out in zip(self.regions, buffers, strict=True)]
        for read in reads:
            read.wait()
        self._put(buffers)
        with torch._C.DisableTorchFunctionSubclass():
            self._lent = [(tensor, tensor._version) for tensor in self._everything()]

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let these be master weights and state, in the order of `regions`."""
        held = self._held
        with torch._C.DisableTorchFunctionSubclass():
            held.unit.move_shard(tensors[0])
            self._flats = list(tensors[1:])
            if held.step is not None and held.step.fused and self.slots:
                held.step.put_moments(tensors[1], tensors[2])
            elif held.step is not None:
                for (name, _), slot, flat in zip(self.slots, self.slots.values(), self._flats, strict=True):
                    for i in slot.members:
                        held.step.put_state(i, {name: flat[slice(*held.unit.ranges[i])]})
        held.home.adopt()

    @torch.no_grad()
    def give_back(self) -> None:
        """Write what has changed in memory and let go of it."""
        if self._lent is None:
            return
        if self._changed():
            self._held.show_writes()
            with torch._C.DisableTorchFunctionSubclass():
                self._write()
        self._put([self._nothing(region.dtype) for region in self.regions])
        self._lent, self._flats = None, []

    def _write(self) -> None:
        writes = [self._store.write(self.master, self._held.unit.shard)]
        found = self._found()
        for slot in self.slots.values():
            slot.members.clear()
        for key, tensors in found.items():
            slot = self._slot(key)
            slot.members.update(tensors)
            writes.append(self._store.write(slot.region, self._flat(key, tensors)))
        for write in writes:
            write.wait()

    def _flat(self, key: tuple[str, torch.dtype], tensors: dict[int, torch.Tensor]) -> torch.Tensor:
        """State of one name and dtype, [n]: what was lent, while nothing was put in its place."""
        parts = {i: slice(*self._held.unit.ranges[i]) for i in tensors}
        lent = dict(zip(self.slots, self._flats, strict=False)).get(key)
        if lent is not None and all(t.data_ptr() == lent[parts[i]].data_ptr() for i, t in tensors.items()):
            return lent
        flat = self._store.buffer(self.master.numel, key[1]).zero_()
        for i, tensor in tensors.items():
            flat[parts[i]].copy_(tensor.flatten())
        return flat

    # -- step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        step: ChunkStep,
        groups: Groups,
        gradient: tuple[torch.Tensor, float],
        tensors: Sequence[torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        """Step what was read from the disk; it is to be written back.

        Args:
            step: steps the chunk.
            groups: of `ChunkStep.groups`.
            gradient: [n], and what it is multiplied by.
            tensors: what `regions` held; state that the step makes gets regions, and is written, here.
            weights: [n] in the dtype of computation; the new values go there. May be the master weights.
        """
        if step.fused:
            step.run_adam(groups, *gradient, weights, (tensors[0], tensors[1], tensors[2]))
            return
        keys, kept = list(self.slots), self._held.unit.kept
        parts = {
            i: {
                key[0]: flat[slice(*self._held.unit.ranges[i])] for key, flat in self._pairs(keys, tensors, i)
            }
            for i in range(len(kept))
        }
        made = step.run_any(groups, *gradient, weights, tensors[0], parts)
        with torch._C.DisableTorchFunctionSubclass():
            self._keep(made, parts, dict(zip(keys, tensors[1:], strict=False)))

    def _pairs(
        self, keys: Sequence[tuple[str, torch.dtype]], tensors: Sequence[torch.Tensor], index: int
    ) -> list[tuple[tuple[str, torch.dtype], torch.Tensor]]:
        slots = zip(keys, tensors[1 : 1 + len(keys)], strict=True)
        return [(key, flat) for key, flat in slots if index in self.slots[key].members]

    def _keep(
        self,
        made: dict[int, dict],
        parts: Mapping[int, dict[str, torch.Tensor]],
        flats: dict[tuple[str, torch.dtype], torch.Tensor],
    ) -> None:
        """Take over the state that a step left: into what was read, or into a new region for what was not there."""
        held, new = self._held, {}
        assert held.step is not None
        found = belonging(made, held)
        for key, tensors in found.items():
            for i, tensor in tensors.items():
                if parts[i].get(key[0]) is not tensor:
                    if key not in flats:
                        flats[key] = new[key] = self._store.buffer(self.master.numel, key[1]).zero_()
                    flats[key][slice(*held.unit.ranges[i])].copy_(tensor.flatten())
                self._slot(key).members.add(i)
        for i, state in made.items():
            away = {
                name: self._nothing(dtype)[slice(*held.unit.ranges[i])]
                for (name, dtype), tensors in found.items()
                if i in tensors
            }
            held.step.put_state(i, {**state, **away})
        for write in [self._store.write(self.slots[key].region, flat) for key, flat in new.items()]:
            write.wait()


def belonging(states: dict[int, dict], held: Held) -> dict[tuple[str, torch.dtype], dict[int, torch.Tensor]]:
    """The tensors of parameters' states that are as large as their parameters, by name and dtype, by parameter."""
    found: dict[tuple[str, torch.dtype], dict[int, torch.Tensor]] = {}
    for i, state in states.items():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == held.unit.kept[i].numel():
                found.setdefault((name, value.dtype), {})[i] = value
    return found
