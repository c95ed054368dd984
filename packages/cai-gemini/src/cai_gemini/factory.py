"""The factory of `offload` and `ChunkResidency`: makes the disk, the schedule and the optimizer that users ask for."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.optimizer_step import ChunkStep
from cai_gemini.engine.disk_use import disk_user, open_store
from cai_gemini.engine.engine import Engine, Schedule
from cai_gemini.engine.planner import Tuning, planner
from cai_gemini.optimizer import OffloadedOptimizer
from cai_gemini.planning.budget import device_budget
from cai_gemini.planning.disk_plan import ChunkBytes, OnDisk, choose
from cai_gemini.planning.tiers import Tiers
from cai_gemini.steps.streaming import check_streamed
from cai_mesh.errors import PlanError

if TYPE_CHECKING:
    from cai_mesh.comm import AnyMesh

UseDisk = Callable[[int, OffloadedChunk], None]


@dataclass(frozen=True)
class Factory:
    """Makes what an engine's chunks need to be trained.

    Args:
        fractions: the shares that stay on the device; None: those of the shortest predicted step.
        device_memory: bytes that torch may take of the device, or such as "22GB"; None: what it may take anyway.
        host_memory: bytes that chunks may take on the host; None: no limit.
        nvme: a directory on a disk; None: there is none.
        tuning: details.
    """

    fractions: Tiers | None
    device_memory: int | str | None
    host_memory: int | str | None
    nvme: str | os.PathLike[str] | None
    tuning: Tuning

    @property
    def tiers(self) -> Tiers:
        """The fractions that users ask for: none at all where the shortest step decides."""
        return self.fractions or Tiers()

    def budget(self, device: torch.device) -> int:
        """Bytes that tensors may take on the device. Raises `PlanError` where a plan needs them and nobody knows."""
        return device_budget(self.device_memory, device, needed=self.fractions is None)

    def check(self, optimizer: torch.optim.Optimizer, params: Iterable[nn.Parameter], fix: str) -> None:
        """Raise `PlanError` for an optimizer that cannot step what is offloaded.

        Args:
            params: the parameters that it may hold.
            fix: the advice in the error where it holds others.
        """
        members = {id(p) for p in params}
        if any(id(p) not in members for group in optimizer.param_groups for p in group["params"]):
            raise PlanError("the optimizer holds parameters the model does not have", fix=fix)
        check_streamed(self.tiers.streamed, optimizer)

    def on_disk(self, sizes: Sequence[ChunkBytes]) -> OnDisk:
        """Return which chunks use the disk. Raises `PlanError` where the host has no room for the others."""
        return choose(
            sizes, self.tiers.disk, self.tiers.disk_weights, self.host_memory, disk=self.nvme is not None
        )

    def disk_user(self, engine: Engine, sizes: Sequence[ChunkBytes], on_disk: OnDisk) -> UseDisk:
        """Return what puts chunks, by index, on the disk as soon as they are made, so that one at a time is in memory.

        Raises `PlanError` where the disk has no room, `NvmeError` for a bad directory.
        """
        store = open_store(self.nvme, sizes, on_disk)
        if store is not None:
            engine.use_store(store)
        return disk_user(engine, sizes, on_disk)

    def schedule(self, engine: Engine, chunks: Sequence[OffloadedChunk], budget: int) -> Schedule:
        """Return the moment and limits of an engine's plan; rates are measured now, where a plan needs them."""
        return Schedule(
            budget, planner(self.fractions, engine, chunks, budget, self.tuning), self.tuning.warmup
        )

    def optimizer(
        self, optimizer: torch.optim.Optimizer, engine: Engine, mesh: AnyMesh | None = None
    ) -> OffloadedOptimizer:
        """Return the optimizer that steps an engine's chunks where they are, of one that has taken them over."""
        return OffloadedOptimizer(optimizer, engine, self.tuning.overlap, engine.copies.device, mesh)


def take_over(
    optimizer: torch.optim.Optimizer, chunks: Sequence[OffloadedChunk], flat: Mapping[int, nn.Parameter]
) -> None:
    """Let the optimizer have the flat parameters, with what state it has, and step chunk by chunk.

    Args:
        flat: the flat parameters, by the ids of those that the optimizer may have in their place.
    """
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            master = flat[id(param)]
            state = optimizer.state.pop(param, None)
            if state is not None:
                optimizer.state[master] = {
                    name: _flat_on_host(value, master) for name, value in state.items()
                }
            group["params"][i] = master
    for chunk in chunks:
        chunk.prepare(ChunkStep(optimizer, chunk.unit))


def _flat_on_host(value: Any, param: nn.Parameter) -> Any:
    """State of a parameter, flat where it is as large; counters too are read on the host at every step."""
    if not isinstance(value, torch.Tensor):
        return value
    with torch._C.DisableTorchFunctionSubclass():
        like = value.dim() > 0 and value.numel() == param.numel()
    return value.detach().flatten().cpu() if like else value.detach().cpu()
