"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.group_norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def group_norm(
    x: torch.Tensor,
    groups: int,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    silu: bool = False,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Group norm (Wu and He, arXiv:1803.08494), as `torch.nn.functional.group_norm`, and SiLU of it in the same pass.

    Torch's turns an image whose channels lie last into one whose channels lie first; this one leaves it as it lies.

    Args:
        x: [N, C, ...], float32, bfloat16 or float16 (the reference takes float64 too). Channels first or last are read
            where they lie (channels last: `torch.channels_last`, or [N, L, C] transposed); other strides are copied.
        groups: divides C; statistics are those of C / groups neighbouring channels of a sample.
        weight, bias: [C] on x's device, of any of these dtypes; each may be None.
        eps: added to the variance.
        silu: return `silu(y)` (Hendrycks and Gimpel, arXiv:1606.08415), y not rounded before.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns x's shape, dtype and layout, computed in float32. Differentiable in x, weight and bias, whose gradients are
    summed in float32, always in the same order; only x and two numbers a group are kept for backward. One graph under
    torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require("x", x, dtypes=dtypes)
    if x.dim() < 2:
        raise KernelError("x has no channels", got=f"a tensor of {x.dim()} dims", expected="[N, C, ...]")
    channels = x.shape[1]
    if groups < 1 or channels % groups:
        raise KernelError(
            "groups does not divide the channels of x", got=groups, expected=f"a divisor of {channels}"
        )
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        require(name, parameter, dtypes=dtypes, like=x)
        if parameter.shape != (channels,):
            raise KernelError(f"{name} does not fit x", got=tuple(parameter.shape), expected=f"({channels},)")
    if form == "reference":
        return reference.group_norm(x, groups, weight, bias, eps, silu)
    from cai_kernels.group_norm import triton

    weight, bias = (p if p is None else p.contiguous() for p in (weight, bias))
    return triton.group_norm(x, groups, weight, bias, eps, silu)[0]
