"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from typing import Any, Literal

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.grouped_matmul import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_EXPERTS = 1024


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    *,
    backend: Backend | Literal["torch"] = "auto",
) -> torch.Tensor:
    """`x[offsets[e] : offsets[e + 1]] @ weight[e]` for every expert e, in one launch; groups may be empty.

    Nothing waits for the offsets on the host (except the reference). Sums are float32, gradients of weights too until
    they are rounded once.

    Args:
        x: [T, D], float32, bfloat16 or float16 (the reference takes float64 too), ordered by expert.
        weight: [E, D, F] in x's dtype, any strides: parameters held as [E, F, D] are passed as
            `weight.transpose(1, 2)`, without a copy, and their gradient has their strides.
        offsets: [E + 1] int32, not decreasing, offsets[0] = 0, as `token_permute` returns them. Rows from
            offsets[E] on belong to no expert: their outputs and gradients are zeros.
        backend: "torch" is `torch._grouped_mm` (bfloat16, D and F multiples of 8, 16-byte aligned; fast on Hopper and
            on data-centre Blackwell), "triton" and "reference" are ours; "auto" takes "torch" where it takes the
            arguments on such a GPU, else Triton on CUDA, else the reference.

    Returns [T, F] in x's dtype. Differentiable in x and weight. Raises `KernelError` naming the argument that does
    not fit.
    """
    form = "torch" if backend == "torch" else choose(backend, x.device)
    double = (*_DTYPES, torch.float64)
    require("x", x, dtypes=double if form == "reference" else _DTYPES)
    require("weight", weight, dtypes=(x.dtype,), like=x)
    require("offsets", offsets, dtypes=(torch.int32,), like=x)
    if x.dim() != 2 or weight.dim() != 3 or weight.shape[1] != x.shape[1]:
        raise KernelError(
            "weight does not fit x",
            got=f"x {tuple(x.shape)}, weight {tuple(weight.shape)}",
            expected="x [T, D], weight [E, D, F]",
            fix="pass weight.transpose(1, 2) where experts are held as [E, F, D]",
        )
    if offsets.shape != (weight.shape[0] + 1,):
        raise KernelError(
            "offsets does not fit weight", got=tuple(offsets.shape), expected=f"({weight.shape[0] + 1},)"
        )
    if form == "reference":
        return reference.grouped_matmul(x, weight, offsets)
    return kernels_for(x, weight, backend).grouped_matmul(x, weight, offsets)


def kernels_for(x: torch.Tensor, weight: torch.Tensor, backend: str) -> Any:
    """Return the module of the kernels that run: torch's where they are asked for or fast, else ours.

    It has `grouped_matmul(x, weight, offsets)` and its gradient, `grouped_matmul_weight(x, dout, weight, offsets)`.
    """
    from cai_kernels.grouped_matmul import torch_kernel, triton

    if backend != "triton":
        reason = torch_kernel.why_not(x, weight)
        if reason is None and (backend == "torch" or torch_kernel.fast(x.device)):
            return torch_kernel
        if backend == "torch":
            raise KernelError("torch's grouped matmul does not take these arguments", got=reason)
    if weight.shape[0] > MAX_EXPERTS:
        raise KernelError(
            "weight has too many experts for Triton", got=weight.shape[0], expected=f"up to {MAX_EXPERTS}"
        )
    return triton
