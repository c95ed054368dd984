"""Forward, input gradient and weight gradient of the linear cross-entropy as three calls, for split backwards."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from cai_kernels.backend import Backend, require
from cai_kernels.cross_entropy.function import check_options
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy.chunked import W, X
from cai_kernels.linear_cross_entropy.function import CHUNK_BYTES, Rows, prepare
from cai_kernels.linear_cross_entropy.rows import LOGIT_SUM, PLAIN


class RowOptions(TypedDict, total=False):
    """Options of `linear_cross_entropy` that make its rows; give all three calls the same."""

    bias: torch.Tensor | None
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    chunk_bytes: int
    backend: Backend


def _checked(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    backend: Backend = "auto",
) -> tuple[Rows, int, list[float], int]:
    check_options("none", label_smoothing, z_loss, softcap)
    rows = prepare(x.detach(), weight.detach(), bias, target, backend=backend, chunk_bytes=chunk_bytes)
    numbers = [float(label_smoothing), float(z_loss), float(softcap or 0.0)]
    return rows, ignore_index, numbers, LOGIT_SUM if label_smoothing else PLAIN


def _upstream(rows: Rows, target: torch.Tensor, stats: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    require("dloss", dloss, dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16), like=target)
    if dloss.shape != target.shape:
        raise KernelError("dloss does not fit target", got=tuple(dloss.shape), expected=tuple(target.shape))
    if stats.shape != (4, target.numel()):
        raise KernelError("stats do not fit target", got=tuple(stats.shape), expected=(4, target.numel()))
    flat = dloss.detach().reshape(-1).to(stats.dtype)
    return torch.stack((flat, torch.zeros_like(flat)))


def _tensors(rows: Rows) -> list[torch.Tensor]:
    return [t for t in rows.inputs[:3] if t is not None]


@torch.no_grad()
def linear_cross_entropy_forward(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Unpack[RowOptions]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [...], stats [4, tokens]) of x [..., D], weight [V, D], target [...]; no gradients flow.

    The stats go to `linear_cross_entropy_input_grad` and `linear_cross_entropy_weight_grad`. Raises `KernelError` as
    `linear_cross_entropy` does.
    """
    from cai_kernels.linear_cross_entropy import autograd

    rows, ignore_index, numbers, aux = _checked(x, weight, target, **options)
    losses, _, _, stats = autograd.linear_scan(*rows.inputs, ignore_index, numbers, aux, rows.how)
    return losses.view(target.shape), stats


@torch.no_grad()
def linear_cross_entropy_input_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    dloss: torch.Tensor,
    **options: Unpack[RowOptions],
) -> torch.Tensor:
    """The gradient of x, [..., D] in its dtype, for dloss [...] of every row's loss: two products a chunk."""
    from cai_kernels.linear_cross_entropy import chunked

    rows, ignore_index, numbers, aux = _checked(x, weight, target, **options)
    upstream = _upstream(rows, target, stats, dloss)
    dx, _, _ = chunked.linear_scan_backward(
        _tensors(rows), rows.inputs[3], stats, upstream, ignore_index, numbers, aux, X, rows.how
    )
    return dx.view(x.shape)


@torch.no_grad()
def linear_cross_entropy_weight_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    stats: torch.Tensor,
    dloss: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    **options: Unpack[RowOptions],
) -> torch.Tensor:
    """The gradient of weight, [V, D] in float32 (float64 for float64), for dloss [...] of every row's loss.

    Given `out` [V, D], in float32 or the weight's dtype, the gradient is added to it, chunk by chunk, and it is
    returned: so it may be the view of a larger gradient buffer.
    """
    from cai_kernels.linear_cross_entropy import chunked

    rows, ignore_index, numbers, aux = _checked(x, weight, target, **options)
    upstream = _upstream(rows, target, stats, dloss)
    tensors, flat = _tensors(rows), rows.inputs[3]
    if out is None:
        return chunked.linear_scan_backward(
            tensors, flat, stats, upstream, ignore_index, numbers, aux, W, rows.how
        )[1]
    require(
        "out", out, dtypes=(torch.promote_types(tensors[1].dtype, torch.float32), tensors[1].dtype), like=x
    )
    if out.shape != weight.shape:
        raise KernelError("out does not fit weight", got=tuple(out.shape), expected=tuple(weight.shape))
    chunked.linear_add_weight_grad(
        tensors, flat, stats, upstream, out.detach(), ignore_index, numbers, aux, rows.how
    )
    return out
