"""Public entry point: argument checks and the choice of the backend."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from cai_kernels.backend import Backend, choose, require
from cai_kernels.errors import KernelError
from cai_kernels.skinny_linear import reference

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_ROWS = 64
MOST_LAYERS = 3


def skinny_linears(
    hidden: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    *,
    backend: Backend = "auto",
) -> list[torch.Tensor]:
    """Return `hidden @ weight.T + bias` of up to three linear layers that have one input of few rows, in one launch.

    With few rows the time is that of reading the weights. They are read where they are, none is copied beside another.
    As in decoding, where queries, keys and values are layers of one input.

    Args:
        hidden: [.., inputs], float32, bfloat16 or float16; up to 64 rows in Triton.
        weights: one to three of [outputs, inputs] in hidden's dtype, contiguous, of any outputs.
        biases: [outputs] of each layer, or none at all.
        backend: "auto" (Triton on CUDA, else the reference), "triton" or "reference".

    Returns [.., outputs] of each layer. Products are summed in float32. Takes no gradient. Raises `KernelError` naming
    the argument that does not fit.
    """
    form = choose(backend, hidden.device)
    _check(hidden, weights, biases)
    rows = hidden.reshape(-1, hidden.shape[-1])
    if form == "reference":
        outs = reference.linears(rows, weights, biases)
    else:
        from cai_kernels.skinny_linear import triton

        if rows.shape[0] > MOST_ROWS:
            raise KernelError("hidden has too many rows", got=rows.shape[0], expected=f"up to {MOST_ROWS}")
        outs = triton.skinny_linears(rows.contiguous(), list(weights), list(biases))
    return [out.view(*hidden.shape[:-1], out.shape[1]) for out in outs]


def skinny_pays(rows: int, outputs: Sequence[int]) -> bool:
    """Return whether one launch of `skinny_linears` is faster than torch's own products, as measured on an H200.

    Args:
        rows: number of rows.
        outputs: number of outputs of every layer.
    """
    if rows == 1:
        return True
    return rows <= MOST_ROWS and (len(outputs) > 1 or (rows <= 16 and sum(outputs) >= 2048))


def _check(hidden: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]) -> None:
    require("hidden", hidden, dtypes=_DTYPES)
    if not 1 <= len(weights) <= MOST_LAYERS or len(biases) not in (0, len(weights)):
        raise KernelError(
            "there are one to three layers",
            got=f"{len(weights)} weights, {len(biases)} biases",
            expected="as many biases as weights, or none",
        )
    for number, weight in enumerate(weights):
        name = f"weights[{number}]"
        require(name, weight, dtypes=(hidden.dtype,), like=hidden)
        if weight.dim() != 2 or weight.shape[1:] != hidden.shape[-1:] or not weight.is_contiguous():
            raise KernelError(
                f"{name} does not fit hidden",
                got=f"{tuple(weight.shape)}, strides {weight.stride()}",
                expected=f"[outputs, {hidden.shape[-1]}], contiguous",
            )
    for number, (weight, bias) in enumerate(zip(weights, biases, strict=bool(biases))):
        require(f"biases[{number}]", bias, dtypes=_DTYPES, like=hidden)
        if bias.shape != weight.shape[:1]:
            raise KernelError(
                f"biases[{number}] does not fit its weight",
                got=tuple(bias.shape),
                expected=f"({weight.shape[0]},)",
            )
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (hidden, *weights, *biases)):
        raise KernelError("skinny_linears takes no gradient", fix="torch.no_grad(), or torch's own linear")
