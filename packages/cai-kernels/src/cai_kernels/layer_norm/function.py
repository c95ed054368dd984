"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.layer_norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """Layer norm over the last dim (Ba et al., arXiv:1607.06450), as `torch.nn.functional.layer_norm` over one dim.

    Args:
        x: [..., D], float32, bfloat16 or float16 (the reference takes float64 too), any strides.
        weight, bias: [D] on x's device, of any of these dtypes; each may be None.
        eps: added to the variance.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., D] in x's dtype, computed in float32. Differentiable in x, weight and bias, whose gradients are
    summed in float32; one graph under torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require("x", x, dtypes=dtypes)
    if x.dim() == 0:
        raise KernelError("x has no dim to normalize", got="a tensor of 0 dims", expected="[..., D]")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is None:
            continue
        require(name, parameter, dtypes=dtypes, like=x)
        if parameter.shape != x.shape[-1:]:
            raise KernelError(
                f"{name} does not fit x", got=tuple(parameter.shape), expected=f"({x.shape[-1]},)"
            )
    if form == "reference":
        return reference.layer_norm(x, weight, bias, eps)
    from cai_kernels.layer_norm import triton

    weight, bias = (p if p is None else p.contiguous() for p in (weight, bias))
    return triton.layer_norm(x, weight, bias, eps)[0]
