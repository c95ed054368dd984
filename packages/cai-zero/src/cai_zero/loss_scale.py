"""Dynamic loss scaling for float16 (Micikevicius et al., arXiv:1710.03740), agreed on by the ranks of a mesh.

float16 gradients below 6e-8 are zero, so the loss is multiplied by a large number before backward and the gradients
divided by it after. A step whose gradients overflowed is left out and the number made smaller; after many good steps
it is made larger.

The verbs are those of `torch.amp.GradScaler`, and a loop reads alike. That class itself will not do: it looks for
overflow in what one rank holds. Here ranks hold different shards, so one would skip and the others step, and every rank
would then wait for a collective that the others never enter.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import torch

from cai_mesh.comm import AnyMesh, ParallelMesh, all_reduce, axis_names
from cai_mesh.errors import MeshError, PlanError
from cai_mesh.gradients import local_gradient
from cai_mesh.layout import record_of
from cai_mesh.protocols import GradSync

_SKIPS_BY_ITSELF = (torch.optim.Adam, torch.optim.Adagrad)
"""Fused, these read `found_inf` on the device. Fused SGD does too, but if it skips its first step, its momentum starts
from uninitialized memory."""


class LossScale:
    """Multiplies losses, divides gradients, skips steps that overflowed: on all ranks of a mesh or on none.

        scale = LossScale(mesh)
        for batch in data:
            scale.scale(loss_of(model, batch)).backward()
            scale.unscale_(optimizer)              # only to clip, or to look at the gradients
            optimizer.clip_grad_norm_(1.0)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()

    Works with what `shard_optimizer` returns, with any optimizer over the shards of a `shard_module` model, and with an
    ordinary optimizer on replicated or tensor-parallel parameters. Compute the loss itself in float32: a float16 loss
    gets its gradient, the scale, in float16, which ends at 65504.

    Whether to skip waits for the device once a step, unless the optimizer is a fused Adam, AdamW or Adagrad of torch,
    which decides on the device.

    Args:
        mesh: the whole mesh, pipeline and tensor axes included: every rank of it calls `unscale_`, `step` and `update`
            alike. None: one process.
        initial: the first scale.
        growth, interval: the scale is multiplied by `growth` after `interval` good steps in a row.
        backoff: and by `backoff` after a step that overflowed.

    Raises `PlanError` for numbers that would not grow or not back off.
    """

    def __init__(
        self,
        mesh: AnyMesh | None = None,
        *,
        initial: float = 2.0**16,
        growth: float = 2.0,
        backoff: float = 0.5,
        interval: int = 2000,
    ):
        if not (0 < initial < math.inf and growth > 1 and 0 < backoff < 1 and interval >= 1):
            raise PlanError(
                "a loss scale cannot work with these numbers",
                got=f"initial={initial}, growth={growth}, backoff={backoff}, interval={interval}",
                expected="initial > 0, growth > 1, 0 < backoff < 1, interval >= 1",
            )
        self.growth, self.backoff, self.interval = growth, backoff, interval
        self._mesh = None if mesh is None else ParallelMesh.of(mesh, alone="dp_shard")
        self._scale = torch.tensor(initial, dtype=torch.float32)
        self._good = torch.tensor(0, dtype=torch.int32)
        self._skipped = torch.tensor(0, dtype=torch.int64)
        if mesh is not None:
            self._move(torch.device(mesh.device_type))
        self._found: dict[int, torch.Tensor] = {}

    def _move(self, device: torch.device) -> None:
        self._scale, self._good = self._scale.to(device), self._good.to(device)
        self._skipped = self._skipped.to(device)

    @property
    def value(self) -> float:
        """The scale. Waits for the device."""
        return float(self._scale)

    @property
    def skipped(self) -> int:
        """Steps skipped so far. Waits for the device."""
        return int(self._skipped)

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to call `backward` on, of any shape; float32 for a scalar float16 loss."""
        if self._mesh is None and self._scale.device != loss.device:
            self._move(loss.device)
        return loss * self._scale.to(loss.device, non_blocking=True)

    def unscaled(self, loss: torch.Tensor) -> torch.Tensor:
        """A scaled loss as it was, or a sum of such. Nothing waits for the device."""
        return loss / self._scale.to(loss.device, loss.dtype, non_blocking=True)

    @torch.no_grad()
    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients of an optimizer by the scale and agree whether any is not finite. Collective.

        Waits for pending reductions of a sharded optimizer; those of `shard_module` (tied parameters) are finished by
        the loop before. Raises `PlanError` when called twice for a step, `MeshError` where gradients are sharded along
        an axis that the mesh lacks.
        """
        if id(optimizer) in self._found:
            raise PlanError(
                "the gradients of this optimizer have been unscaled already",
                cause="unscale_ or step was called twice",
                fix="call update() after every step",
            )
        if isinstance(optimizer, GradSync):
            optimizer.finish()
        params = [p for group in optimizer.param_groups for p in group["params"]]
        _check_axes(params, getattr(optimizer, "mesh", None), self._mesh)
        grads: dict[tuple, list[torch.Tensor]] = defaultdict(list)
        for p in params:
            grad = local_gradient(p)
            if grad is not None and grad.numel():
                grads[grad.device, grad.dtype].append(grad)
        overflow = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        inverse = self._scale.double().reciprocal().float()
        for (device, _), device_grads in grads.items():
            device_overflow = torch.zeros((), dtype=torch.float32, device=device)
            torch._amp_foreach_non_finite_check_and_unscale_(
                device_grads, device_overflow, inverse.to(device, non_blocking=True)
            )
            overflow = torch.maximum(overflow, device_overflow.to(overflow.device, non_blocking=True))
        if self._mesh is not None:
            all_reduce(overflow, self._mesh.group(axis_names(self._mesh)), op="max")
        self._found[id(optimizer)] = overflow

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Step the optimizer, on no rank if the gradients of any are not finite: the loop drops those. Collective."""
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        overflow = self._found[id(optimizer)]
        inner = getattr(optimizer, "inner", optimizer)
        if isinstance(inner, _SKIPS_BY_ITSELF) and getattr(inner, "_step_supports_amp_scaling", False):
            inner.found_inf = overflow
            try:
                optimizer.step()
            finally:
                del inner.found_inf
        elif not overflow.item():
            optimizer.step()

    @torch.no_grad()
    def update(self) -> None:
        """Change the scale by what was found in this step. After the `step` of every optimizer.

        Raises `PlanError` where there was none.
        """
        if not self._found:
            raise PlanError("a loss scale is updated before any step", fix="call step(optimizer) first")
        overflow = torch.stack(list(self._found.values())).amax()
        self._skipped += overflow.to(torch.int64)
        torch._amp_update_scale_(self._scale, self._good, overflow, self.growth, self.backoff, self.interval)
        self._found.clear()

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers, the same on all ranks. Waits for the device."""
        return {"scale": self.value, "good_steps": int(self._good), "skipped": self.skipped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what `state_dict` gave."""
        self._scale.fill_(state_dict["scale"])
        self._good.fill_(state_dict["good_steps"])
        self._skipped.fill_(state_dict["skipped"])
        self._found.clear()


def _check_axes(params: list[torch.Tensor], sharded: ParallelMesh | None, mesh: ParallelMesh | None) -> None:
    axes = {axis for p in params for part in record_of(p).slices or () for axis in part.axes}
    axes |= set(axis_names(sharded)) if sharded is not None else set()
    names = mesh.names if mesh is not None else ()
    if not axes <= set(names):
        raise MeshError(
            "gradients are sharded along axes that the mesh of their loss scale lacks",
            got=f"{sorted(axes)} on a mesh of {names}",
            cause="ranks would not agree on which steps to skip",
            fix="LossScale(mesh) with the whole mesh",
        )
