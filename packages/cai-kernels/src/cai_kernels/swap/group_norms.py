"""Group norms: modules that run torch's own `nn.GroupNorm.forward`, which needs no trial.

In a compiled graph they keep torch's code: there Inductor joins the norm with the activation after it, as our kernel
would, and with what comes before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from cai_kernels.backend import Backend
from cai_kernels.group_norm import group_norm
from cai_kernels.swap.record import Swapped, taken
from cai_kernels.swap.structure import transformed

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def swap_group_norms(model: nn.Module, record: Swapped, backend: Backend) -> None:
    """Replace the forward of every group norm of `model`."""
    for name, module in model.named_modules():
        if getattr(type(module), "forward", None) is not nn.GroupNorm.forward:
            continue
        reason = taken(module)
        if reason is None:
            record.put(name, module, _forward(backend), "norm", "group_norm")
        else:
            record.leave(name, "norm", reason)


def _forward(backend: Backend) -> Callable:
    def forward(self, *args: Any, **kwargs: Any):
        x = args[0] if len(args) == 1 and not kwargs else None
        if torch.compiler.is_compiling() or not _fits(self, x):
            return type(self).forward(self, *args, **kwargs)
        return group_norm(x, self.num_groups, self.weight, self.bias, self.eps, backend=backend)

    return forward


def _fits(module: nn.GroupNorm, x: Any) -> bool:
    """Whether the kernel gives what torch's does; no value of a tensor is looked at."""
    if not isinstance(x, torch.Tensor) or x.dtype not in DTYPES or x.dim() < 2 or transformed():
        return False
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32:
        return False  # torch's result is float32 there
    parameters = [p for p in (module.weight, module.bias) if p is not None]
    plain_parameters = all(type(p) in (torch.Tensor, nn.Parameter) and p.dtype == x.dtype for p in parameters)
    return plain_parameters and x.shape[1] == module.num_channels and x.numel() > 0
