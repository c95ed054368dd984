"""The public door: arguments checked, backend chosen."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.rms_norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, backend: Backend = "auto"
) -> torch.Tensor:
    """Root-mean-square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467), as LLaMA computes it.

    `weight * (x / sqrt(mean(x²) + eps)).to(x.dtype)`, with the mean in float32 (float64 stays in the reference).

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too), any strides.
        weight: [D], on x's device.
        eps: added to the mean of squares.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., D] in the dtype `weight * x` has. Differentiable in x and weight; one graph under torch.compile.
    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    require("x", x, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("weight", weight, dtypes=(*_DTYPES, torch.float64), like=x)
    if x.dim() == 0 or weight.shape != x.shape[-1:]:
        raise KernelError(
            "weight does not fit x", got=tuple(weight.shape), expected=f"({x.shape[-1] if x.dim() else 'D'},)"
        )
    if form == "reference":
        return reference.rms_norm(x, weight, eps)
    from cai_kernels.rms_norm import triton

    if x.shape[-1] > triton.MAX_COLUMNS or weight.dtype != x.dtype:
        raise KernelError(
            "the Triton rms_norm does not take this shape or dtype",
            got=f"D {x.shape[-1]}, x {x.dtype}, weight {weight.dtype}",
            expected=f"D up to {triton.MAX_COLUMNS}, weight of x's dtype",
            fix='cast the weight, or use backend="reference"',
        )
    flat = x.reshape(-1, x.shape[-1]).contiguous()
    return triton.rms_norm(flat, weight.contiguous(), eps)[0].view(x.shape)
