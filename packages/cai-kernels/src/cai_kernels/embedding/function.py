"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.embedding import reference
from cai_kernels.errors import KernelError

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def embedding(
    ids: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    *,
    backend: Backend = "auto",
) -> torch.Tensor:
    """`torch.nn.functional.embedding(ids, weight, padding_idx)`, with a gradient that is exact and always the same.

    Forward is torch's own gather. Backward sorts the ids once and adds the gradients of each id in float32, in an order
    that never changes: no atomics, one rounding to weight's dtype.

    Args:
        ids: [...] int64 or int32, from 0 to V - 1.
        weight: [V, D], float32, bfloat16 or float16 (the reference takes float64 too).
        padding_idx: an id whose row gets no gradient; negative counts from V.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [..., D]. Differentiable in weight, with a dense gradient. One graph under torch.compile. Raises
    `KernelError` naming the argument that does not fit.
    """
    form = choose(backend, weight.device)
    require("weight", weight, dtypes=_DTYPES if form == "triton" else (*_DTYPES, torch.float64))
    require("ids", ids, dtypes=(torch.int64, torch.int32), like=weight)
    if weight.dim() != 2:
        raise KernelError("weight has another number of dims", got=tuple(weight.shape), expected="[V, D]")
    if padding_idx is not None:
        if not -weight.shape[0] <= padding_idx < weight.shape[0]:
            raise KernelError(
                "padding_idx is no row of weight", got=padding_idx, expected=f"below {weight.shape[0]}"
            )
        padding_idx %= weight.shape[0]
    if form == "reference":
        return reference.embedding(ids, weight, padding_idx)
    from cai_kernels.embedding import triton

    return triton.embedding(ids, weight, -1 if padding_idx is None else padding_idx)
