"""`torch.optim.AdamW` whose steps run the kernel; its state and its checkpoints are torch's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.adamw import adamw

from cai_kernels.adamw.function import GRAD_DTYPES, launch
from cai_kernels.adamw.options import AdamWOptions, Tensors
from cai_kernels.backend import Backend, choose
from cai_kernels.errors import KernelError

_OTHER = ("amsgrad", "maximize", "capturable", "differentiable")
_OPTIONS = (*_OTHER, "foreach", "fused", "lr", "eps", "weight_decay")
_PLAIN = {torch.Tensor, torch.nn.Parameter}
_GRADS = set(GRAD_DTYPES)

Params = Any


class FusedAdamW(torch.optim.AdamW):
    """`torch.optim.AdamW(fused=True)` in one pass over memory, which scales the gradients too.

    Args:
        params, lr, betas, eps, weight_decay: as `torch.optim.AdamW`.
        backend: "auto" (Triton on CUDA, else torch's own step), "triton" (an error where it cannot run) or "reference"
            (torch's own step).

    Attributes:
        gradient_factor: factor on the gradients of the next step, applied as they are read; 1 again after it. The
            gradients stay as they are. Clipping by a norm needs no pass of its own so. A number, or a tensor of one
            value, which the host does not wait for. A factor that is not finite leaves the step out.
        halves: (bfloat16, int16) by parameter, of those that lie in halves in the next step (see `adamw_step_`): the
            halves are stepped, and the memory of the parameter is not touched. None again after it. Only the kernel
            steps halves: ask `takes_halves`.

    The state is that of torch's fused AdamW: `step` (float32, on the parameter's device), `exp_avg`, `exp_avg_sq`. So
    each loads the other's state dict.

    The kernel steps the param groups whose parameters with a gradient are float32 and contiguous, the gradients too
    (those may be bfloat16). Torch steps any other group, and all while a gradient scaler has set `found_inf`; then the
    gradients themselves are multiplied by `gradient_factor`, once the host has read it. Raises `KernelError` inside a
    CUDA graph's capture, which would repeat the learning rate of one step.
    """

    gradient_factor: float | torch.Tensor = 1.0
    halves: Mapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
    backend: Backend = "auto"

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        backend: Backend = "auto",
    ):
        self.backend = backend
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """A step, with gradients times `gradient_factor`; returns what `closure` does, if there is one."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise KernelError(
                "FusedAdamW takes its learning rate from the host, which a CUDA graph does not ask again",
                fix="torch.optim.AdamW(fused=True, capturable=True)",
            )
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        factor, self.gradient_factor = self.gradient_factor, 1.0
        halves, self.halves = self.halves, None
        for group in self.param_groups:
            self._step_group(group, factor, halves)
        return loss

    def takes_halves(self) -> bool:
        """Whether the kernel will step all there is a gradient of, as options and a gradient scaler are now.

        Not where a subclass or a hook on steps may use the parameters themselves.
        """
        if type(self) is not FusedAdamW or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks:
            return False
        group_params = [[p for p in group["params"] if p.grad is not None] for group in self.param_groups]
        return all(
            self._fits(group, params, [p.grad for p in params], (), (), halves=True)
            for group, params in zip(self.param_groups, group_params, strict=True)
        )

    def _step_group(
        self,
        group: dict[str, Any],
        factor: float | torch.Tensor,
        halves: Mapping[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None,
    ) -> None:
        lists: tuple[list[torch.Tensor], ...] = ([], [], [], [], [], [])
        params, grads, exp_avgs, exp_avg_sqs, _, steps = lists
        has_complex = self._init_group(group, *lists)
        if not params:
            return
        beta1, beta2 = group["betas"]
        if not self._fits(group, params, grads, exp_avgs, exp_avg_sqs, halves=halves is not None):
            if halves is not None:
                raise KernelError("parameters in halves need the kernel", fix="ask takes_halves() first")
            factor = float(factor)
            if not math.isfinite(factor):
                return
            if factor != 1.0:
                torch._foreach_mul_(grads, factor)
            scaler = {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}
            numbers = {name: group[name] for name in _OPTIONS}
            adamw(*lists, has_complex=has_complex, beta1=beta1, beta2=beta2, **scaler, **numbers)
            return
        if isinstance(factor, torch.Tensor):
            _count(steps, factor.isfinite().float())
        elif math.isfinite(factor):
            torch._foreach_add_(steps, 1)
        options = AdamWOptions(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])
        lows: Sequence[torch.Tensor | None] = [None] * len(params)
        if halves is not None:
            params, lows = zip(*(halves[param] for param in params), strict=True)
        columns = (params, grads, exp_avgs, exp_avg_sqs, lows)
        launch(list(map(Tensors._make, zip(*columns, strict=True))), options, steps, factor)

    def _fits(
        self,
        group: dict[str, Any],
        params: Sequence[torch.Tensor],
        grads: Sequence[torch.Tensor],
        exp_avgs: Sequence[torch.Tensor],
        exp_avg_sqs: Sequence[torch.Tensor],
        *,
        halves: bool,
    ) -> bool:
        """Whether the kernel can step these parameters of a group, or their halves."""
        if any(choose(self.backend, device) != "triton" for device in {p.device for p in params}):
            return False
        scaled = any(getattr(self, name, None) is not None for name in ("grad_scale", "found_inf"))
        tensors = any(isinstance(number, torch.Tensor) for number in (group["lr"], *group["betas"]))
        if scaled or tensors or any(group[name] for name in _OTHER):
            return False
        masters = [*([] if halves else params), *exp_avgs, *exp_avg_sqs]
        every = [*masters, *grads]
        return (
            _PLAIN.issuperset(map(type, every))
            and {t.dtype for t in masters} <= {torch.float32}
            and {grad.dtype for grad in grads} <= _GRADS
            and all(map(torch.Tensor.is_contiguous, every))
        )


def _count(steps: Sequence[torch.Tensor], increment: torch.Tensor) -> None:
    """Add `increment`, 0 or 1 on a device, to steps that may lie on others."""
    for device in {step.device for step in steps}:
        device_steps = [step for step in steps if step.device == device]
        torch._foreach_add_(device_steps, [increment.to(device, non_blocking=True)] * len(device_steps))
