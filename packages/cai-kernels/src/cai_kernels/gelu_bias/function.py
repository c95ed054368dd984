"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.gelu_bias import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gelu_bias(
    x: torch.Tensor,
    bias: torch.Tensor,
    *,
    approximate: Literal["tanh", "none"] = "none",
    backend: Backend = "auto",
) -> torch.Tensor:
    """`gelu(x + bias)` (Hendrycks and Gimpel, arXiv:1606.08415): a linear layer's bias joined with its activation.

    Args:
        x: [..., F], float32, bfloat16 or float16 (the reference takes float64 too), any strides.
        bias: [F], of x's dtype and device.
        approximate: "none" (erf) or "tanh", as in `torch.nn.functional.gelu`.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., F] in x's dtype; the kernel keeps x + bias in float32. Differentiable in x and bias, whose gradient is
    summed in float32; only x is kept for backward. One graph under torch.compile. Raises `KernelError` naming the
    argument that does not fit.
    """
    form = choose(backend, x.device)
    require("x", x, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("bias", bias, dtypes=(x.dtype,), like=x)
    if x.dim() == 0 or bias.shape != x.shape[-1:]:
        raise KernelError(
            "bias does not fit x", got=tuple(bias.shape), expected=f"({x.shape[-1] if x.dim() else 'F'},)"
        )
    if approximate not in ("tanh", "none"):
        raise KernelError("unknown approximate", got=repr(approximate), expected="'tanh' or 'none'")
    if form == "reference":
        return reference.gelu_bias(x, bias, approximate)
    from cai_kernels.gelu_bias import triton

    return triton.gelu_bias(x, bias.contiguous(), "gelu_tanh" if approximate == "tanh" else "gelu")
