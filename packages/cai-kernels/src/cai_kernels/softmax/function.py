"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.softmax import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MAX_DIMS, MAX_BIASES = 5, 2  # of the kernel


def softmax(
    x: torch.Tensor,
    *,
    scale: float = 1.0,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | tuple[torch.Tensor, ...] | None = None,
    causal: bool = False,
    dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`softmax(scale * x + bias)` over the last dim, of the places that `mask` and `causal` leave.

    Args:
        x: [..., K] of any strides, up to 5 dims in Triton; float32, bfloat16 or float16 (the reference takes float64
            too).
        scale: a number that multiplies x alone.
        mask: bool, broadcastable to x; false places get no weight. A row with no place left is all zeros.
        bias: a floating tensor broadcastable to x, or a tuple of up to two, each in any of these dtypes. So are
            AlphaFold's forms: x [B, R, N, Q, K], a mask bias [B, R, 1, 1, K] and a pair bias [B, 1, N, Q, K].
        causal: x is [..., Q, K] and query q sees keys up to q + K - Q: the last query sees all of them.
        dtype: dtype of the result; x's by default.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., K], contiguous, computed in float32. Differentiable in x and in every bias, whose gradients are summed
    over broadcast dims in float32 and always in the same order; only the result is kept. One graph under torch.compile.
    Raises `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, x.device)
    dtypes = _DTYPES if form == "triton" else (*_DTYPES, torch.float64)
    require("x", x, dtypes=dtypes)
    biases = () if bias is None else (bias,) if isinstance(bias, torch.Tensor) else tuple(bias)
    if len(biases) > MAX_BIASES:
        raise KernelError("too many biases", got=len(biases), expected=f"up to {MAX_BIASES}")
    if x.dim() == 0 or (causal and x.dim() < 2):
        raise KernelError(
            "x has too few dims", got=tuple(x.shape), expected="[..., Q, K]" if causal else "[..., K]"
        )
    for name, other in (("mask", mask), *(("bias", b) for b in biases)):
        if other is not None:
            _check_broadcast(name, other, x, (torch.bool,) if name == "mask" else dtypes)
    out = x.dtype if dtype is None else dtype
    if out not in dtypes:
        raise KernelError("unsupported dtype of the result", got=out, expected=", ".join(map(str, dtypes)))
    if form == "reference":
        return reference.softmax(x, scale, mask, biases, causal, out)
    if x.dim() > MAX_DIMS:
        raise KernelError(
            "x has too many dims for the Triton softmax",
            got=x.dim(),
            expected=f"up to {MAX_DIMS}",
            fix='flatten some, or use backend="reference"',
        )
    from cai_kernels.softmax import triton

    first, second = (*biases, None, None)[:2]
    return triton.softmax(x, first, second, mask, float(scale), causal, out)


def _check_broadcast(
    name: str, other: torch.Tensor, x: torch.Tensor, dtypes: tuple[torch.dtype, ...]
) -> None:
    require(name, other, dtypes=dtypes, like=x)
    fits = other.dim() <= x.dim() and all(
        b in (1, a) for a, b in zip(reversed(x.shape), reversed(other.shape), strict=False)
    )
    if not fits:
        raise KernelError(
            f"{name} does not fit x", got=tuple(other.shape), expected=f"broadcastable to {tuple(x.shape)}"
        )
