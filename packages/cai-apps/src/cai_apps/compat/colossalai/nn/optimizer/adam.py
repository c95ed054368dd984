"""AdamW under the names of ColossalAI: one kernel on GPUs, and torch's own step elsewhere and under offload."""

from __future__ import annotations

from typing import Any

from cai_apps.compat.colossalai.absent import AbsentError
from cai_kernels import FusedAdamW

Params = Any


class HybridAdam(FusedAdamW):
    """AdamW, stepped where its state is.

    Args:
        model_params, lr, betas, eps, weight_decay: as `torch.optim.AdamW`.
        bias_correction, adamw_mode: True.
        nvme_offload_fraction, nvme_offload_dir: not here.
        defaults: unused.

    Raises:
        AbsentError: other than by default, or state on a disk.
    """

    def __init__(
        self,
        model_params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        adamw_mode: bool = True,
        nvme_offload_fraction: float = 0.0,
        nvme_offload_dir: str | None = None,
        **defaults: Any,
    ):
        self.bias_correction, self.adamw_mode = bias_correction, adamw_mode
        self.nvme_offload_fraction, self.nvme_offload_dir = nvme_offload_fraction, nvme_offload_dir
        self.model_params = ()
        _check(type(self).__name__, weight_decay, bias_correction=bias_correction, adamw_mode=adamw_mode)
        if nvme_offload_fraction:
            raise AbsentError(
                f"{type(self).__name__} keeps no state on a disk by itself",
                got=f"nvme_offload_fraction = {nvme_offload_fraction}",
                fix='ConfigPlugin(BoostConfig(memory=Memory(residency="nvme", nvme=DIRECTORY), parallel=...))',
            )
        super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


class CPUAdam(HybridAdam):
    """AdamW; with a plugin that offloads its state is stepped on the host."""


class FusedAdam(FusedAdamW):
    """AdamW in one kernel.

    Args:
        params, lr, betas, eps, weight_decay: as `torch.optim.AdamW`.
        bias_correction, adamw_mode, amsgrad: True, True and False.
        set_grad_none: unused: `zero_grad` has it.

    Raises:
        AbsentError: other than by default.
    """

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adamw_mode: bool = True,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,
    ):
        self.bias_correction, self.adamw_mode, self.set_grad_none = bias_correction, adamw_mode, set_grad_none
        _check("FusedAdam", weight_decay, bias_correction=bias_correction, adamw_mode=adamw_mode)
        if amsgrad:
            raise AbsentError("FusedAdam has no amsgrad", fix="torch.optim.AdamW(..., amsgrad=True)")
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)


def _check(name: str, weight_decay: float, *, bias_correction: bool, adamw_mode: bool) -> None:
    if not bias_correction:
        raise AbsentError(f"{name} corrects its moments", got="bias_correction = False", fix="leave it out")
    if not adamw_mode and weight_decay:
        raise AbsentError(
            f"{name} decays weights apart from the gradient",
            got=f"adamw_mode = False, weight_decay = {weight_decay}",
            fix="torch.optim.Adam(model.parameters(), lr=..., weight_decay=...)",
        )
