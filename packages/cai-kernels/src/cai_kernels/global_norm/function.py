"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.global_norm import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def global_norm(
    tensors: Iterable[torch.Tensor], p: float = 2.0, *, backend: Backend = "auto"
) -> torch.Tensor:
    """The p-norm of all values of many tensors at once, as gradient clipping needs it; the host never waits.

    Args:
        tensors: one or more, of any shapes, strides (contiguous ones are not copied) and devices, in float32, bfloat16
            or float16 (the reference takes float64 too). Tensors of one dtype and device share a launch.
        p: a positive number, or math.inf for the largest magnitude.
        backend: "auto" (Triton on CUDA, else the reference; float64 always takes the reference), "triton" or
            "reference".

    Returns a 0-d float32 tensor on the first tensor's device (float64 if one of them is), summed in float32 and always
    in the same order; nan if any value is. Not differentiable, and not for CUDA graphs: the tensors' addresses are read
    anew in every call. Raises `KernelError` naming the argument that does not fit.
    """
    every = [t.detach() for t in tensors]
    if not every:
        raise KernelError("tensors is empty", expected="at least one tensor")
    if not p > 0:
        raise KernelError("p is not positive", got=p, expected="above 0, or math.inf")
    forms = {choose(backend, device) for device in {t.device for t in every}}
    double = backend == "auto" and any(t.dtype == torch.float64 for t in every)
    kernels = forms == {"triton"} and not double
    for i, tensor in enumerate(every):
        require(f"tensors[{i}]", tensor, dtypes=_DTYPES if kernels else (*_DTYPES, torch.float64))
    if not kernels:
        return reference.global_norm(every, p)
    from cai_kernels.global_norm import triton

    return triton.global_norm(every, float(p))
