"""The weights of a session with the optimizer that steps them: one protocol, whoever shards or offloads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from cai_gemini import OffloadedOptimizer
from cai_kernels import FusedAdamW
from cai_mesh.gradients import clip_factor, grad_norm, local_gradient
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_mesh.protocols import GradSync
from cai_zero import ModuleSharding, ShardedOptimizer, optimizer_state, restore_groups


class Weights(Protocol):
    """What a session does with its weights."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Its `param_groups` hold the learning rates."""
        ...

    @property
    def sync(self) -> GradSync | None:
        """Combines gradients over data ranks while backward runs; None where nobody else has any."""
        ...

    @property
    def offloaded(self) -> OffloadedOptimizer | None:
        """The optimizer, where training state is in several memories; it says what is where."""
        ...

    @property
    def stay(self) -> bool:
        """Whether master weights stay in the memory that `state` shows for as long as the session lives."""
        ...

    def norm(self, clip: float) -> Tensor:
        """Finish the gradients; their norm over the whole model, a scalar on the device. Collective.

        Args:
            clip: the norm that the coming `step` will not exceed.
        """
        ...

    def step(self, norm: Tensor | float, clip: float) -> None:
        """Step with gradients of this norm, scaled to `clip` where it is larger, and drop them.

        A number is one that the caller has looked at. A tensor nobody has seen yet: if it is not finite the step is
        left out, which `FusedAdamW` finds on the device; other optimizers wait for the number.
        """

    def finish(self) -> None:
        """Wait for what is still to be reduced. Collective."""

    def drop(self) -> None:
        """Drop the gradients."""

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Names of parameters (or of parts of several) with this rank's part of their gradients, as they are."""
        ...

    def state(self) -> dict[str, Any]:
        """Model and optimizer for a checkpoint: views, into which a checkpoint is loaded."""
        ...

    def loaded(self, groups: list) -> None:
        """Take over what a checkpoint was loaded into; `groups` are the options of the param groups from now on."""

    def masters(self) -> dict[str, BoxedTensor] | None:
        """Master weights by name where the model's own parameters are rounded ones."""
        ...


def _named(model: nn.Module) -> dict[str, nn.Parameter]:
    return {canonical_name(name, param): param for name, param in model.named_parameters()}


MODEL = "model."
"""What names of master weights begin with in a checkpoint."""


def _state(model: dict[str, Any], optimizer: dict[str, Any]) -> dict[str, Any]:
    return {f"{MODEL}{name}": value for name, value in model.items()} | {
        f"optimizer.{name}": value for name, value in optimizer.items()
    }


class Replicated:
    """ZeRO stages 0 to 2: every rank computes with unsharded parameters; `shard_optimizer` steps shards."""

    offloaded = None

    def __init__(self, model: nn.Module, optimizer: ShardedOptimizer, *, stay: bool):
        self.optimizer, self.sync, self.stay = optimizer, optimizer, stay
        self._model = model

    def finish(self) -> None:
        self.optimizer.finish()

    def norm(self, clip: float) -> Tensor:
        return self.optimizer.grad_norm()

    def step(self, norm: Tensor | float, clip: float) -> None:
        if _scaled(self.optimizer.inner, norm, clip, self.optimizer.scale_gradients):
            self.optimizer.step()
        self.drop()

    def drop(self) -> None:
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, boxed in self.optimizer.gradients().items():
            yield from ((name, view) for _, view in boxed.pieces)

    def state(self) -> dict[str, Any]:
        named = _named(self._model)
        model = {n: BoxedTensor.from_param(p) for n, p in named.items() if not p.requires_grad}
        return _state(model | self.optimizer.weights(), self.optimizer.state_for_checkpoint())

    def loaded(self, groups: list) -> None:
        restore_groups(self.optimizer, groups)
        self.optimizer.publish()

    def masters(self) -> dict[str, BoxedTensor] | None:
        return self.optimizer.weights()


class Sharded:
    """ZeRO stage 3: parameters are this rank's shards, gathered by block; an ordinary optimizer steps them."""

    offloaded = None
    stay = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        sharding: ModuleSharding,
        mesh: DeviceMesh,
    ):
        self.optimizer, self.sync = optimizer, sharding
        self._model, self._mesh = model, mesh

    def finish(self) -> None:
        self.sync.finish()

    def norm(self, clip: float) -> Tensor:
        self.finish()
        return grad_norm(self._model.parameters(), self._mesh)

    def step(self, norm: Tensor | float, clip: float) -> None:
        if _scaled(self.optimizer, norm, clip, self._scale):
            self.optimizer.step()
        self.drop()

    def _scale(self, factor: float) -> None:
        torch._foreach_mul_([grad for _, grad in self.gradients()], factor)

    def drop(self) -> None:
        self.optimizer.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return _gradients(self._model)

    def state(self) -> dict[str, Any]:
        model = {name: BoxedTensor.from_param(p) for name, p in _named(self._model).items()}
        return _state(model, optimizer_state(self.optimizer, self._model))

    def loaded(self, groups: list) -> None:
        restore_groups(self.optimizer, groups)

    def masters(self) -> dict[str, BoxedTensor] | None:
        return None


class Offloaded:
    """Weights, gradients and optimizer state in device and host memory, on one rank or as shards of stage 3.

    The norm is taken as gradients pass by, and they are scaled as they are stepped with.
    """

    stay = False

    def __init__(self, model: nn.Module, optimizer: OffloadedOptimizer, sync: GradSync | None):
        self.offloaded = optimizer
        self.optimizer, self.sync = optimizer, sync
        self._model = model

    def finish(self) -> None:
        if self.sync is not None:
            self.sync.finish()

    def norm(self, clip: float) -> Tensor:
        self.finish()
        return self.offloaded.clip_grad_norm_(clip)

    def step(self, norm: Tensor | float, clip: float) -> None:
        if not isinstance(norm, Tensor) or math.isfinite(norm):
            self.offloaded.step()
        self.drop()

    def drop(self) -> None:
        self.offloaded.zero_grad()

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        return _gradients(self._model)

    def state(self) -> dict[str, Any]:
        return self.offloaded.checkpoint_state()

    def loaded(self, groups: list) -> None:
        restore_groups(self.optimizer, groups)

    def masters(self) -> dict[str, BoxedTensor] | None:
        return None


def _gradients(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """What is here of every gradient."""
    local_gradients = ((name, local_gradient(param)) for name, param in _named(model).items())
    return ((name, grad) for name, grad in local_gradients if grad is not None)


def _scaled(
    optimizer: torch.optim.Optimizer, norm: Tensor | float, clip: float, scale: Callable[[float], None]
) -> bool:
    """Scale the gradients of the coming step, of this norm, to `clip`; whether to take it, as far as the host knows.

    `FusedAdamW` scales as it reads.
    """
    fused = isinstance(optimizer, FusedAdamW)
    if fused and isinstance(norm, Tensor):
        optimizer.gradient_factor = clip_factor(norm, clip).masked_fill(~norm.isfinite(), math.nan)
        return True
    if isinstance(norm, Tensor) and not math.isfinite(norm):
        return False
    if norm > clip:
        factor = float(clip_factor(torch.as_tensor(norm, dtype=torch.float64), clip))
        if fused:
            optimizer.gradient_factor = factor
        else:
            scale(factor)
    return True
