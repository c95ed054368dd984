"""Forward, input gradient and weight gradient of the linear cross-entropy as three calls, for split backwards."""

from __future__ import annotations

from typing import TypedDict, Unpack

import torch

from cai_kernels.backend import Backend, require
from cai_kernels.cross_entropy.function import check_options
from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import autograd, chunked
from cai_kernels.linear_cross_entropy.inputs import CHUNK_BYTES, Inputs, prepare
from cai_kernels.linear_cross_entropy.options import Needed, float32_or_wider


class RowOptions(TypedDict, total=False):
    """The options of the three calls, as in `linear_cross_entropy`; give all three the same."""

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
) -> tuple[Inputs, LossOptions]:
    check_options("none", label_smoothing, z_loss, softcap)
    inputs = prepare(x.detach(), weight.detach(), bias, target, backend=backend, chunk_bytes=chunk_bytes)
    return inputs, LossOptions(ignore_index, float(label_smoothing), float(z_loss), float(softcap or 0.0))


def _upstream(target: torch.Tensor, stats: torch.Tensor, dloss: torch.Tensor) -> torch.Tensor:
    require("dloss", dloss, dtypes=(torch.float32, torch.float64, torch.bfloat16, torch.float16), like=target)
    if dloss.shape != target.shape:
        raise KernelError("dloss does not fit target", got=tuple(dloss.shape), expected=tuple(target.shape))
    if stats.shape != (4, target.numel()):
        raise KernelError("stats do not fit target", got=tuple(stats.shape), expected=(4, target.numel()))
    flat = dloss.detach().reshape(-1).to(stats.dtype)
    return torch.stack((flat, torch.zeros_like(flat)))


def _gradients(
    inputs: Inputs, loss: LossOptions, stats: torch.Tensor, upstream: torch.Tensor, needed: Needed
) -> chunked.Gradients:
    return chunked.linear_scan_backward(
        *inputs.tensors(),
        stats,
        upstream,
        **loss.arguments(),
        statistic=loss.statistic,
        **needed.arguments(),
        chunk_rows=inputs.execution.chunk_rows,
        triton=inputs.execution.triton,
        sum_dtype=inputs.execution.sum_dtype,
    )


@torch.no_grad()
def linear_cross_entropy_forward(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, **options: Unpack[RowOptions]
) -> tuple[torch.Tensor, torch.Tensor]:
    """(losses [...], stats [4, tokens]) of x [..., D], weight [V, D], target [...]; no gradients flow.

    The stats go to `linear_cross_entropy_input_grad` and `linear_cross_entropy_weight_grad`. Raises `KernelError` as
    `linear_cross_entropy` does.
    """
    inputs, loss = _checked(x, weight, target, **options)
    losses, _, _, stats = autograd.linear_scan(
        *inputs.tensors(), **loss.arguments(), statistic=loss.statistic, **inputs.execution.arguments()
    )
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
    inputs, loss = _checked(x, weight, target, **options)
    upstream = _upstream(target, stats, dloss)
    dx, _, _ = _gradients(inputs, loss, stats, upstream, Needed(x=True))
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

    Given `out` [V, D], in float32 or the weight's dtype, the gradient is added to it, chunk by chunk, and `out` is
    returned. It may be a view of a larger gradient buffer.
    """
    inputs, loss = _checked(x, weight, target, **options)
    upstream = _upstream(target, stats, dloss)
    if out is None:
        _, dw, _ = _gradients(inputs, loss, stats, upstream, Needed(weight=True))
        return dw
    require("out", out, dtypes=(float32_or_wider(inputs.weight.dtype), inputs.weight.dtype), like=x)
    if out.shape != weight.shape:
        raise KernelError("out does not fit weight", got=tuple(out.shape), expected=tuple(weight.shape))
    chunked.linear_add_weight_grad(
        *inputs.tensors(),
        stats,
        upstream,
        out.detach(),
        **loss.arguments(),
        statistic=loss.statistic,
        chunk_rows=inputs.execution.chunk_rows,
        triton=inputs.execution.triton,
    )
    return out
