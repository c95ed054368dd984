"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.dropout_add import reference
from cai_kernels.errors import KernelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def dropout_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    p: float,
    *,
    training: bool = True,
    seed: int | torch.Tensor | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`residual + dropout(x, p)` (Srivastava et al., JMLR 15, 2014).

    Which values are dropped is a function of the seed and a value's place in x alone, the same in every run. The kernel
    makes it again in backward (Philox, Salmon et al., SC 2011) and stores no mask. The reference draws from torch's
    generator and so drops other values than the kernel under the same seed.

    Args:
        x, residual: one shape, dtype and device, float32, bfloat16 or float16 (the reference takes float64 too), any
            strides.
        p: the share of x that is dropped, 0 to 1, in the kernel to the nearest 1/65536; what is kept is divided by
            1 - p.
        training: False is plain `residual + x`.
        seed: an integer, or a tensor of one int64 on x's device, which may be drawn or counted up without a wait of the
            host. None draws one from torch's generator on x's device.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns the sum, contiguous, in x's dtype; computed in float32 and rounded once. Differentiable in x and residual.
    One graph under torch.compile. Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    require("x", x, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("residual", residual, dtypes=(x.dtype,), like=x)
    if residual.shape != x.shape:
        raise KernelError("residual does not fit x", got=tuple(residual.shape), expected=tuple(x.shape))
    if not 0.0 <= p <= 1.0:
        raise KernelError("p is no probability", got=p, expected="0 to 1")
    if isinstance(seed, torch.Tensor):
        require("seed", seed, dtypes=(torch.int64,), like=x)
        if seed.numel() != 1:
            raise KernelError(
                "seed is not one number", got=tuple(seed.shape), expected="a tensor of one value"
            )
    if not training or p == 0.0:
        return residual + x
    if seed is None:
        seed = torch.randint(0, 2**63 - 1, (), device=x.device)
    elif not isinstance(seed, torch.Tensor):
        if not -(2**63) <= seed < 2**63:
            raise KernelError("seed does not fit 64 bits", got=seed, expected="-2**63 to 2**63 - 1")
        seed = torch.full((), seed, dtype=torch.int64, device=x.device)
    if form == "reference":
        return reference.dropout_add(x, residual, reference.dropout_mask(x, p, seed), p)
    from cai_kernels.dropout_add import triton

    return triton.dropout_add(x, residual, float(p), seed)
