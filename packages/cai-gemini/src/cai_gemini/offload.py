"""`offload`: one device, an ordinary loop, and a model whose weights and optimizer live in host memory.

Each block's weights are copied to the device before its forward and its backward and freed after; its gradients go
to the host as soon as they are complete; the optimizer steps there (ZeRO-Offload, Ren et al., arXiv:2101.06840;
chunked as in PatrickStar, Fang et al., arXiv:2108.05818).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cai_gemini.host import HostResidency
from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer
from cai_mesh.lifecycle import ModuleLifecycle
from cai_mesh.protocols import Residency, Stored
from cai_mesh.units import FlatUnit, blocks, check_parameters


class _Offloaded:
    """Moves the units of one model between its residency and the device."""

    def __init__(self, model: nn.Module, residency: Residency, compute: torch.dtype | None):
        self._root, self._residency = model, residency
        units = blocks(model)
        check_parameters(pair for params in units.values() for pair in params)
        self._units = {module: self._chunks(params, compute) for module, params in units.items()}
        self._stored = {
            id(unit): Stored(unit.chunk, unit.shard, unit.whole.device)
            for us in self._units.values()
            for unit in us
        }
        self._buffers = {
            id(unit): GradBuffer(unit.chunk, unit.used, unit.shard.dtype, unit.whole.device)
            for us in self._units.values()
            for unit in us
        }
        self._lifecycle = ModuleLifecycle(
            {module: [p for unit in us for p in unit.used] for module, us in self._units.items()}
        )
        self._lifecycle.listen(self)

    def _chunks(self, params: list[tuple[str, nn.Parameter]], compute: torch.dtype | None) -> list[FlatUnit]:
        kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, param in params:
            kinds.setdefault((param.dtype, param.requires_grad), []).append((name, param))
        return [
            FlatUnit(
                self._root,
                members,
                master=dtype,
                compute=compute or dtype,
                device=members[0][1].device,
                place=self._residency.place,
            )
            for (dtype, _), members in kinds.items()
        ]

    def kept(self) -> dict[int, nn.Parameter]:
        """Every parameter of the model that was, by id, and the host parameter that stands for it."""
        return {
            before: after
            for units in self._units.values()
            for unit in units
            for before, after in zip(unit.sources, unit.kept, strict=True)
        }

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        for chunk in self._units[unit]:
            if not chunk.is_whole:
                self._bring(chunk)

    @torch.no_grad()
    def _bring(self, chunk: FlatUnit) -> None:
        stored = self._stored[id(chunk)]
        handle = self._residency.fetch(stored)
        chunk.allocate_storage()
        handle.wait()
        assert stored.on_device is not None
        chunk.whole.copy_(stored.on_device)
        self._residency.release(stored)
        chunk.swap_in()

    def after_use(self, unit: nn.Module) -> None:
        if not (unit is self._root and torch.is_grad_enabled()):
            self._free(unit)

    def _free(self, unit: nn.Module) -> None:
        for chunk in self._units[unit]:
            if chunk.is_whole:
                chunk.free_storage()

    @torch.no_grad()
    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self._units[unit]:
            buffer = self._buffers[id(chunk)]
            if buffer.has_gradients:
                buffer.take()
                gradients = buffer.hand_over()
                pending = chunk.shard_gradient
                if pending is None:
                    chunk.set_shard_gradient(self._residency.place(gradients))
                else:
                    pending.add_(gradients.to(pending.device))
        self._free(unit)

    def backward_done(self) -> None:
        for unit in self._units:
            self._free(unit)


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    residency: str = "host",
    compute: torch.dtype | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Keep a model's weights, gradients and optimizer state in host memory, in place; no process group needed.

    The loop stays as it is: forward, backward, `torch.nn.utils.clip_grad_norm_(model.parameters(), ...)`,
    `optimizer.step()`, `optimizer.zero_grad()`. Parameters keep their names; between uses each is a flat host tensor.

    Args:
        model: on its compute device. Blocks (elements of `nn.ModuleList`) move one at a time.
        optimizer: any elementwise torch optimizer over the model's parameters, before its first step. It steps on
            the host; build it with `fused=True` for torch's fused CPU kernel.
        residency: "host".
        compute: dtype of the weights on the device; None: as they are. The host keeps the original dtype.

    Raises `PlanError` for another residency, an optimizer that has stepped, or parameters that cannot be flat.
    Returns the model and the optimizer.
    """
    if residency != "host":
        raise PlanError("unknown residency", got=residency, expected="'host'")
    if optimizer.state:
        raise PlanError("the optimizer has already stepped", fix="offload before its first step")
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise PlanError(
            "the optimizer holds parameters the model does not have", fix="build it on model.parameters()"
        )
    stays: Any = _Offloaded(model, HostResidency(), compute)
    kept = stays.kept()
    for group in optimizer.param_groups:
        group["params"] = [kept[id(p)] for p in group["params"]]
    return model, optimizer
