"""The optimizer that `boost` returns: the user's own, over the parameters as they are on the ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from cai_apps.booster.config import BoostConfig
from cai_apps.booster.model import BoostedModel
from cai_apps.compose.weights import Weights
from cai_mesh.errors import ConfigError
from cai_mesh.gradients import local_gradient
from cai_mesh.protocols import GradSync
from cai_zero import LossScale


class BoostedOptimizer(torch.optim.Optimizer):
    """A user's optimizer after `boost`, for a loop of `booster.backward(loss, optimizer)`, `step()`, `zero_grad()`.

    `step` finishes the gradients, clips them to the plugin's norm and, with float16, leaves a step out that overflowed;
    it gives back the memory of the gradients. Schedules of learning rates made for the user's optimizer go on.

    Args:
        optimizer: the user's optimizer.
        model: the boosted model.
        weights: the weights that it steps.
        config: the resolved config.
        mesh: the mesh of the ranks.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: BoostedModel,
        weights: Weights,
        config: BoostConfig,
        mesh: Any,
    ):
        self.optim, self.model, self.weights = optimizer, model, weights
        self._clip, self._norm, self._deferred, self._unscaled = config.optimizer.clip, None, False, False
        scaling = config.scaling
        self.loss_scale: LossScale | None = None
        if config.precision.compute == "fp16":
            self.loss_scale = LossScale(
                mesh,
                initial=scaling.initial,
                growth=scaling.growth,
                backoff=scaling.backoff,
                interval=scaling.interval,
            )
        self.defaults = optimizer.defaults
        model.deferring = self.no_sync

    # -- what an optimizer is ----------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The user's groups, with the rates that schedules write."""
        return self.weights.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of what this rank steps."""
        return self.weights.optimizer.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Step further parameters of the model from now on."""
        self.weights.optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; `booster.save_optimizer` writes that of all ranks."""
        return self.weights.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take over what this rank's `state_dict` gave; `booster.load_optimizer` reads files of any ranks."""
        self.weights.optimizer.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients."""
        self.weights.optimizer.zero_grad(set_to_none)

    def unwrap(self) -> torch.optim.Optimizer:
        """Return the user's optimizer."""
        return self.optim

    # -- a step ------------------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, inputs: Any = None, retain_graph: bool = False, **kwargs: Any) -> None:
        """Add the gradients of a loss, scaled with float16.

        Raises:
            ConfigError: the model is divided over the ranks of a pipeline.
        """
        if self.model.piped:
            raise ConfigError(
                "a loss has no backward of its own in a pipeline",
                got="booster.backward(loss, optimizer)",
                fix="booster.execute_pipeline(iter([batch]), model, criterion, optimizer) runs forward and backward",
            )
        self.scale_loss(loss).backward(inputs=inputs, retain_graph=retain_graph, **kwargs)

    def backward_by_grad(
        self, tensor: Tensor, grad: Tensor, inputs: Any = None, retain_graph: bool = False
    ) -> None:
        """Add the gradients that follow from the gradient of a tensor."""
        torch.autograd.backward(tensor, grad, inputs=inputs, retain_graph=retain_graph)

    def scale_loss(self, loss: Tensor) -> Tensor:
        """Return the loss times the loss scale; as it is without one."""
        return loss if self.loss_scale is None else self.loss_scale.scale(loss)

    def unscale_grad(self) -> None:
        """Divide the gradients of the coming step by the loss scale. Collective."""
        if self.loss_scale is not None and not self._unscaled:
            self.weights.finish()
            self.loss_scale.unscale_(self.weights.optimizer)
            self._unscaled = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step with the gradients, which are dropped; a step that overflows in float16 is left out. Collective."""
        if closure is not None:
            raise ConfigError(
                "a boosted optimizer takes no closure",
                cause="its gradients come from booster.backward",
                fix="call booster.backward(loss, optimizer), then step()",
            )
        self.unscale_grad()
        if self.loss_scale is not None or math.isfinite(self._clip):
            self._norm = self.weights.norm(self._clip)
        if self.loss_scale is None:
            if self._norm is None or not math.isfinite(self._clip):
                self.weights.optimizer.step()
            else:
                self.weights.step(self._norm, self._clip)
        else:
            if math.isfinite(self._norm):
                self.weights.step(self._norm, self._clip)
            else:
                self.weights.drop()
            self.loss_scale.update()
            self._unscaled = False
        self.optim._opt_called = True  # type: ignore[attr-defined]  # torch's schedules ask whether it has stepped

    def get_grad_norm(self, norm_type: float = 2.0, **kwargs: Any) -> float | None:
        """Return the norm of the last step's gradients before clipping; None where nothing asked for it."""
        return None if self._norm is None else float(self._norm)

    def clip_grad_by_norm(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, **kwargs: Any
    ) -> Tensor:
        """Clip the gradients of the coming step by their norm over the whole model; return it. Collective."""
        self.unscale_grad()
        norm = self.weights.norm(math.inf)
        if error_if_nonfinite and not bool(torch.isfinite(norm)):
            raise ConfigError("the norm of the gradients is not finite", got=float(norm))
        if norm > max_norm:
            self._scale_gradients(float(max_norm / (norm + 1e-6)))
        return norm

    def clip_grad_by_value(self, clip_value: float, **kwargs: Any) -> None:
        """Clip each element of the gradients of the coming step. Collective."""
        self.unscale_grad()
        self.weights.finish()
        nn.utils.clip_grad_value_(list(self.model.module.parameters()), clip_value)

    def _scale_gradients(self, factor: float) -> None:
        for group in self.param_groups:
            grads = [local_gradient(param) for param in group["params"]]
            torch._foreach_mul_([grad for grad in grads if grad is not None and grad.numel()], factor)

    # -- gradients that stay here ------------------------------------------------------------------------------------

    @property
    def sync(self) -> GradSync | None:
        """What combines gradients over ranks; None: nobody else has any."""
        return self.weights.sync

    @property
    def deferred(self) -> bool:
        """Whether gradients only add up at present."""
        return self._deferred

    def no_sync(self) -> AbstractContextManager[None]:
        """Return a context in which backwards, and pipelines, only add up gradients."""
        return nullcontext() if self.sync is None else self._no_sync(self.sync)

    @contextmanager
    def _no_sync(self, sync: GradSync) -> Iterator[None]:
        before, self._deferred = self._deferred, True
        try:
            with sync.defer():
                yield
        finally:
            self._deferred = before
