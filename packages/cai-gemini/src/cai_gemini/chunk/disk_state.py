"""Master weights and optimizer state of one chunk on a disk: loaded for whoever reads them, stepped as they are read.

Between uses the kept parameters have shapes and no values. When somebody reads one, master weights and state of the
chunk are loaded into memory, where they stay until the next step, which writes back what was changed. Of an optimizer's
state, every tensor with as many elements as its parameter is on the disk, in a region for all of the chunk; counters
and other small things stay in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_gemini.chunk.host_weights import HostWeights
from cai_gemini.chunk.optimizer_step import ChunkStep, Groups
from cai_gemini.chunk.unit import Unit
from cai_gemini.nvme import NvmeStore, Region

MOMENTS = ("exp_avg", "exp_avg_sq")
Key = tuple[str, torch.dtype]


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
        name: the chunk's name.
        unit: the chunk, not stepped yet.
        host_weights: the weights that are copied to the device, with the values of the master weights.
        store: takes the regions. Raises `NvmeError` where the disk has no room.

    Attributes:
        master: region of the master weights.
        slots: the state's, by name and dtype.
    """

    def __init__(self, name: str, unit: Unit, host_weights: HostWeights, store: NvmeStore):
        self._name, self._unit, self._host_weights, self._store = name, unit, host_weights, store
        self._step: ChunkStep | None = None
        shard = unit.shard
        self.master = store.reserve(f"{name} (master weights)", shard.numel(), shard.dtype)
        self.slots: dict[Key, Slot] = {}
        self._flats: list[torch.Tensor] = []  # state that is loaded, in the order of slots
        # what is loaded, with its versions then; [] once it was written to; None where nothing is
        self._loaded: list[tuple[torch.Tensor, int]] | None = []
        self.unload()

    @property
    def regions(self) -> list[Region]:
        """The regions of master weights and state, in the order in which a step takes their tensors."""
        return [self.master, *(slot.region for slot in self.slots.values())]

    @property
    def in_memory(self) -> bool:
        """Whether it is loaded."""
        return self._loaded is not None

    def _nothing(self, dtype: torch.dtype) -> torch.Tensor:
        return torch.zeros(1, dtype=dtype).expand(self.master.numel)

    # -- state ---------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt_state(self, step: ChunkStep) -> None:
        """Take the state of what steps the chunk from now on. Adam's starts as zeros that take no writing."""
        has_state = step.has_state
        if has_state:
            self.load()
        self._step = step
        if step.fused:
            for name in MOMENTS:
                slot = self._slot((name, self.master.dtype), zeros=True)
                slot.members.update(range(len(self._unit.kept)))
        if has_state:
            self._loaded = []
            self.unload()
        elif step.fused:
            self._put([self._nothing(self.master.dtype)] * 3)

    def _slot(self, key: Key, *, zeros: bool = False) -> Slot:
        if key not in self.slots:
            name = f"{self._name} ({key[0]})"
            self.slots[key] = Slot(self._store.reserve(name, self.master.numel, key[1], zeros=zeros), set())
        return self.slots[key]

    def _found(self) -> dict[Key, dict[int, torch.Tensor]]:
        """The optimizer's tensors that belong on the disk, by name and dtype, by parameter."""
        step = self._step
        if step is None:
            return {}
        if step.fused:
            step.moments()  # there from the start, for every parameter
        return belonging({i: step.state_of(i) for i in range(len(self._unit.kept))}, self._unit.kept)

    def _everything(self) -> list[torch.Tensor]:
        """Everything that is loaded, as it is now."""
        by_key = self._found()
        return [
            self._unit.shard,
            *self._unit.kept,
            *(tensor for tensors in by_key.values() for _, tensor in sorted(tensors.items())),
        ]

    @property
    def is_changed(self) -> bool:
        """Whether somebody has written to what is loaded."""
        if self._loaded is None:
            return False
        with torch._C.DisableTorchFunctionSubclass():
            now = self._everything()
            return len(now) != len(self._loaded) or any(
                a is not b or a._version != version for a, (b, version) in zip(now, self._loaded, strict=True)
            )

    # -- loading -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def load(self) -> None:
        """Bring all of it into memory, unless it is there."""
        if self._loaded is not None:
            return
        buffers = [self._store.buffer(region.numel, region.dtype) for region in self.regions]
        reads = [self._store.read(region, out) for region, out in zip(self.regions, buffers, strict=True)]
        for read in reads:
            read.wait()
        self._put(buffers)
        with torch._C.DisableTorchFunctionSubclass():
            self._loaded = [(tensor, tensor._version) for tensor in self._everything()]

    def _put(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let these be master weights and state, in the order of `regions`."""
        step = self._step
        with torch._C.DisableTorchFunctionSubclass():
            self._unit.move_shard(tensors[0])
            self._flats = list(tensors[1:])
            if step is not None and step.fused and self.slots:
                step.put_moments(tensors[1], tensors[2])
            elif step is not None:
                for (name, _), slot, flat in zip(self.slots, self.slots.values(), self._flats, strict=True):
                    for i in slot.members:
                        step.put_state(i, {name: flat[slice(*self._unit.ranges[i])]})
        self._host_weights.adopt()

    @torch.no_grad()
    def unload(self) -> None:
        """Write what was changed in memory, and let go of it."""
        if self._loaded is None:
            return
        if self.is_changed:
            with torch._C.DisableTorchFunctionSubclass():
                self._write()
        self._put([self._nothing(region.dtype) for region in self.regions])
        self._loaded, self._flats = None, []

    def _write(self) -> None:
        writes = [self._store.write(self.master, self._unit.shard)]
        by_key = self._found()
        for slot in self.slots.values():
            slot.members.clear()
        for key, tensors in by_key.items():
            slot = self._slot(key)
            slot.members.update(tensors)
            writes.append(self._store.write(slot.region, self._flat(key, tensors)))
        for write in writes:
            write.wait()

    def _flat(self, key: Key, tensors: dict[int, torch.Tensor]) -> torch.Tensor:
        """State of one name and dtype, [n]: what was loaded, while nothing was put in its place."""
        parts = {i: slice(*self._unit.ranges[i]) for i in tensors}
        loaded = dict(zip(self.slots, self._flats, strict=False)).get(key)
        if loaded is not None and all(
            t.data_ptr() == loaded[parts[i]].data_ptr() for i, t in tensors.items()
        ):
            return loaded
        flat = self._store.buffer(self.master.numel, key[1]).zero_()
        for i, tensor in tensors.items():
            flat[parts[i]].copy_(tensor.flatten())
        return flat

    # -- step ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(
        self,
        groups: Groups,
        gradient: tuple[torch.Tensor, float],
        tensors: Sequence[torch.Tensor],
        weights: torch.Tensor,
    ) -> None:
        """Step what was read from the disk; it is to be written back.

        Args:
            groups: param groups, as `ChunkStep.groups` returns them.
            gradient: [n], and what it is multiplied by.
            tensors: the contents of `regions`; state that the step makes gets regions, and is written, here.
            weights: [n] in the dtype of computation; the new values go there. May be the master weights.
        """
        step = self._step
        assert step is not None
        if step.fused:
            step.run_adam(groups, *gradient, weights, (tensors[0], tensors[1], tensors[2]))
            return
        keys, ranges = list(self.slots), self._unit.ranges
        parts = {
            i: {key[0]: flat[slice(*ranges[i])] for key, flat in self._pairs(keys, tensors, i)}
            for i in range(len(self._unit.kept))
        }
        new_states = step.run_any(groups, *gradient, weights, tensors[0], parts)
        with torch._C.DisableTorchFunctionSubclass():
            self._keep(step, new_states, parts, dict(zip(keys, tensors[1:], strict=False)))

    def _pairs(
        self, keys: Sequence[Key], tensors: Sequence[torch.Tensor], index: int
    ) -> list[tuple[Key, torch.Tensor]]:
        slots = zip(keys, tensors[1 : 1 + len(keys)], strict=True)
        return [(key, flat) for key, flat in slots if index in self.slots[key].members]

    def _keep(
        self,
        step: ChunkStep,
        new_states: dict[int, dict[str, Any]],
        parts: Mapping[int, dict[str, torch.Tensor]],
        flats: dict[Key, torch.Tensor],
    ) -> None:
        """Take over the state that a step left: into what was read, or into a new region for what was not there."""
        ranges, new = self._unit.ranges, dict[Key, torch.Tensor]()
        by_key = belonging(new_states, self._unit.kept)
        for key, tensors in by_key.items():
            for i, tensor in tensors.items():
                if parts[i].get(key[0]) is not tensor:
                    if key not in flats:
                        flats[key] = new[key] = self._store.buffer(self.master.numel, key[1]).zero_()
                    flats[key][slice(*ranges[i])].copy_(tensor.flatten())
                self._slot(key).members.add(i)
        for i, state in new_states.items():
            on_disk = {
                name: self._nothing(dtype)[slice(*ranges[i])]
                for (name, dtype), tensors in by_key.items()
                if i in tensors
            }
            step.put_state(i, {**state, **on_disk})
        for write in [self._store.write(self.slots[key].region, flat) for key, flat in new.items()]:
            write.wait()


def belonging(
    states: Mapping[int, dict[str, Any]], params: Sequence[nn.Parameter]
) -> dict[Key, dict[int, torch.Tensor]]:
    """The tensors of parameters' states that are as large as their parameters, by name and dtype, by parameter."""
    by_key: dict[Key, dict[int, torch.Tensor]] = {}
    for i, state in states.items():
        with torch._C.DisableTorchFunctionSubclass():
            size = params[i].numel()
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.numel() == size:
                by_key.setdefault((name, value.dtype), {})[i] = value
    return by_key
