"""Public entry points: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.modulate import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
COLUMNS = 16384
"""The widest rows that the kernel of `modulate` takes: a program holds one in registers."""


def modulate(
    x: torch.Tensor,
    scale: torch.Tensor,
    shift: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`layer_norm(x) * (1 + scale) + shift` a sample: adaptive layer norm (Peebles and Xie, arXiv:2212.09748).

    Args:
        x: [N, T, C], float32, bfloat16 or float16 (the reference takes float64 too); normalized over C without
            parameters. Of other strides than a dense tensor's it is copied.
        scale, shift: [N, C] on x's device, of any of these dtypes; chunks of a wider tensor are read where they lie.
        eps: added to the variance.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [N, T, C] in x's dtype, computed in float32. Differentiable in x, scale and shift, whose gradients are
    summed over tokens in float32, always in the same order; kept for backward are x, scale and two numbers a token.
    One graph under torch.compile. Raises `KernelError` naming the argument that does not fit; Triton takes 16384
    columns at most.
    """
    form = _checked("x", x, {"scale": scale, "shift": shift}, backend)
    if form == "reference":
        return reference.modulate(x, scale, shift, eps)
    if x.shape[-1] > COLUMNS:
        raise KernelError(
            "rows of x are too wide for the Triton kernel",
            got=x.shape[-1],
            expected=f"at most {COLUMNS} columns",
            fix='use backend="reference"',
        )
    from cai_kernels.modulate import triton

    return triton.modulate(x, scale, shift, eps)[0]


def gate_add(
    residual: torch.Tensor, x: torch.Tensor, gate: torch.Tensor, *, backend: Backend = "auto"
) -> torch.Tensor:
    """`residual + gate * x` a sample: how a block with adaptive norms ends (Peebles and Xie, arXiv:2212.09748).

    Args:
        residual, x: [N, T, C], of one dtype and device; dtypes and strides as in `modulate`.
        gate: [N, C] on x's device, of any of these dtypes; a chunk of a wider tensor is read where it lies.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [N, T, C] in x's dtype, computed in float32 and rounded once. Differentiable in all three; the gate's
    gradient is summed over tokens in float32, always in the same order; x and gate are kept. One graph under
    torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    form = _checked("x", x, {"gate": gate}, backend)
    require("residual", residual, dtypes=(x.dtype,), like=x)
    if residual.shape != x.shape:
        raise KernelError("residual does not fit x", got=tuple(residual.shape), expected=tuple(x.shape))
    if form == "reference":
        return reference.gate_add(residual, x, gate)
    from cai_kernels.modulate import triton

    return triton.gate_add(residual, x, gate)


def _checked(name: str, x: torch.Tensor, of_samples: dict[str, torch.Tensor], backend: Backend) -> str:
    """The form that runs, once x [N, T, C] and what there is a sample [N, C] are checked."""
    form = choose(backend, x.device)
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require(name, x, dtypes=dtypes)
    if x.dim() != 3:
        raise KernelError(f"{name} is not tokens of samples", got=tuple(x.shape), expected="[N, T, C]")
    for argument, tensor in of_samples.items():
        require(argument, tensor, dtypes=dtypes, like=x)
        if tensor.shape != (x.shape[0], x.shape[2]):
            raise KernelError(
                f"{argument} does not fit {name}",
                got=tuple(tensor.shape),
                expected=f"({x.shape[0]}, {x.shape[2]})",
            )
    return form
