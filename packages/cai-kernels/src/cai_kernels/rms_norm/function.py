"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Literal

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.rms_norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    casting: Literal["llama", "gemma"] = "llama",
    backend: Backend = "auto",
) -> torch.Tensor:
    """Root-mean-square norm over the last dim (Zhang and Sennrich, arXiv:1910.07467).

    With n = x / sqrt(mean(x²) + eps) in float32 (in float64 for float64, which only the reference takes):
    "llama" is `weight * n.to(x.dtype)`, "gemma" is `(n * (1 + weight)).to(x.dtype)`, as in Hugging Face.

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too), any strides.
        weight: [D] on x's device, of any of these dtypes; None for no weight.
        eps: added to the mean of squares.
        casting: the place of the rounding to x's dtype, see above, and whether the weight is an offset from one.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., D], in x's dtype, or under "llama" the dtype `weight * x` has. Differentiable in x and weight; the
    weight's gradient is summed in float32. One graph under torch.compile. Raises `KernelError` naming the argument
    that does not fit.
    """
    form = choose(backend, x.device)
    check(x, weight, casting, form)
    if form == "reference":
        return reference.rms_norm(x, weight, eps, casting)
    from cai_kernels.rms_norm import triton

    return triton.rms_norm(x, weight if weight is None else weight.contiguous(), eps, casting)[0]


def check(x: torch.Tensor, weight: torch.Tensor | None, casting: str, form: str) -> None:
    """Raise `KernelError` for arguments that an RMS norm cannot take."""
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require("x", x, dtypes=dtypes)
    if casting not in ("llama", "gemma"):
        raise KernelError("unknown casting", got=repr(casting), expected="'llama' or 'gemma'")
    if x.dim() == 0:
        raise KernelError("x has no dim to normalize", got="a tensor of 0 dims", expected="[..., D]")
    if weight is not None:
        require("weight", weight, dtypes=dtypes, like=x)
        if weight.shape != x.shape[-1:]:
            raise KernelError("weight does not fit x", got=tuple(weight.shape), expected=f"({x.shape[-1]},)")
