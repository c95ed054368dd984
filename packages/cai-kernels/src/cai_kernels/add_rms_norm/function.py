"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.add_rms_norm import reference
from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.rms_norm.function import check


def add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: Literal["llama", "gemma"] = "llama",
    backend: Backend = "auto",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`(rms_norm(x + residual), x + residual)`: a block's output joins the residual stream and is normalized at once.

    Args:
        x, residual: [..., D] of one shape, dtype and device: float32, bfloat16 or float16 (the reference takes
            float64 too), any strides.
        weight, eps, casting: as in `rms_norm`.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns (normed, summed), both [..., D]; the sum is rounded to x's dtype before it is normalized, as in eager
    torch, and is the next residual. Differentiable through both. One graph under torch.compile. Raises `KernelError`
    naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    check(x, weight, casting, form)
    require("residual", residual, dtypes=(x.dtype,), like=x)
    if residual.shape != x.shape:
        raise KernelError("residual does not fit x", got=tuple(residual.shape), expected=tuple(x.shape))
    if form == "reference":
        return reference.add_rms_norm(x, residual, weight, eps, casting)
    from cai_kernels.add_rms_norm import triton

    weight = weight if weight is None else weight.contiguous()
    return triton.add_rms_norm(x, residual, weight, eps, casting)[:2]
