"""The linear layer and its loss, a chunk of tokens at a time, as operators: the logits of all tokens never exist.

For each chunk, one matrix product writes the logits to a buffer, one pass replaces them by their gradient, and one
product each adds to the gradients of x and weight. The options of all operators are those of `LossOptions`, `Needed`
and `Execution`.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from cai_kernels.cross_entropy.options import LossOptions
from cai_kernels.linear_cross_entropy import rows, sliced
from cai_kernels.linear_cross_entropy.options import Needed, float32_or_wider
from cai_kernels.linear_cross_entropy.products import accumulate
from cai_kernels.ops import define

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def logits_module(triton: bool) -> ModuleType:
    """The module with the functions that process a chunk of logits."""
    if not triton:
        return rows
    from cai_kernels.linear_cross_entropy import triton as kernels

    return kernels


def _chunks(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, chunk_rows: int
) -> Iterator[tuple[slice, torch.Tensor]]:
    """The rows of every chunk, and its logits in a buffer that the next chunk reuses."""
    tokens = x.shape[0]
    buffer = x.new_empty(min(chunk_rows, tokens), weight.shape[0])
    for start in range(0, tokens, chunk_rows):
        chunk = slice(start, start + chunk_rows)
        out = buffer[: x[chunk].shape[0]]
        if bias is None:
            torch.mm(x[chunk], weight.t(), out=out)
        else:
            torch.addmm(bias, x[chunk], weight.t(), out=out)
        yield chunk, out


def _new_gradients(
    x: torch.Tensor, weight: torch.Tensor, needed: Needed, weight_dtype: torch.dtype
) -> Gradients:
    """Memory for the gradients of x, weight and bias; empty tensors for those not needed."""
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if needed.x else x.new_empty(0)
    dw = weight.new_empty(weight.shape if needed.weight else (0,), dtype=weight_dtype)
    db = weight.new_empty(weight.shape[:1] if needed.bias else (0,), dtype=float32_or_wider(weight.dtype))
    return dx, dw, db


def _zero(gradients: Gradients) -> None:
    for gradient in gradients:
        gradient.zero_()


def _add_gradients(
    logits: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    chunk: slice,
    needed: Needed,
    gradients: Gradients,
) -> None:
    """Add to the gradients of x, weight and bias from the gradient of a chunk's logits."""
    dx, dw, db = gradients
    first = chunk.start == 0
    if needed.x:
        torch.mm(logits, weight, out=dx[chunk])
    if needed.weight:
        accumulate(dw, logits.t(), x[chunk], overwrite=first)
    if needed.bias:
        total = logits.sum(0, dtype=db.dtype)
        db.copy_(total) if first else db.add_(total)


def _linear_loss_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    mean: bool,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
    triton: bool,
    sum_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    logits_in_gradient: bool,
    compiling: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], weight [V, D], target [T] -> (loss, z-loss, dx, dw, db, factor to be applied to these in backward).

    The factor is 1, but 1/tokens for a float16 mean: in forward it would make the gradients of the logits underflow.
    `logits_in_gradient`: compute in slices of the vocabulary, see `sliced`. `compiling`: called in a compiled graph.
    """
    loss = LossOptions(ignore_index, label_smoothing, z_loss, softcap)
    needed = Needed(need_x, need_weight, need_bias)
    scale_in_backward = x.dtype == torch.float16
    out = torch.zeros(2, target.numel(), dtype=float32_or_wider(x.dtype), device=x.device)
    scale = torch.ones((), dtype=out.dtype, device=x.device)
    if mean:
        scale = scale / (target != ignore_index).sum()
    one = torch.ones_like(scale)
    now, later = (one, scale) if scale_in_backward else (scale, one)
    gradients = _new_gradients(x, weight, needed, weight.dtype if logits_in_gradient else sum_dtype)
    if not target.numel():
        _zero(gradients)
    if logits_in_gradient:
        sliced.loss_and_gradients(x, weight, bias, target, now, out, loss, needed, gradients)
    else:
        form = logits_module(triton)
        for chunk, logits in _chunks(x, weight, bias, chunk_rows):
            form.loss_and_gradient(logits, target[chunk], now, out[:, chunk], loss)
            _add_gradients(logits, x, weight, chunk, needed, gradients)
    total, z = (out.sum(1) * scale).unbind(0)
    return total.clone(), z.clone(), *gradients, later


def _empty_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    sum_dtype: torch.dtype,
    logits_in_gradient: bool,
    **_,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scalars = [x.new_empty((), dtype=float32_or_wider(x.dtype)) for _ in range(3)]
    needed, dtype = Needed(need_x, need_weight, need_bias), weight.dtype if logits_in_gradient else sum_dtype
    return scalars[0], scalars[1], *_new_gradients(x, weight, needed, dtype), scalars[2]


def _linear_scan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    statistic: int,
    chunk_rows: int,
    triton: bool,
    sum_dtype: torch.dtype,
    grad_dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], weight [V, D], target [T] -> (losses, z-losses, entropies, each [T], and stats [4, T])."""
    loss, form = LossOptions(ignore_index, label_smoothing, z_loss, softcap), logits_module(triton)
    stats = torch.empty(4, target.numel(), dtype=float32_or_wider(x.dtype), device=x.device)
    for chunk, logits in _chunks(x, weight, bias, chunk_rows):
        stats[:, chunk] = form.scan(logits, target[chunk], ignore_index, softcap, statistic)
    return *rows.losses(stats, target, weight.shape[0], loss), stats


def _empty_scan(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, **_
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    tokens, dtype = target.numel(), float32_or_wider(x.dtype)
    losses, z, entropies = (x.new_empty(tokens, dtype=dtype) for _ in range(3))
    return losses, z, entropies, x.new_empty((4, tokens), dtype=dtype)


def _linear_scan_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    statistic: int,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    chunk_rows: int,
    triton: bool,
    sum_dtype: torch.dtype,
) -> Gradients:
    """Gradients of x, weight and bias; the logits are computed again. upstream [2, T]: of losses and entropies."""
    loss, form = LossOptions(ignore_index, label_smoothing, z_loss, softcap), logits_module(triton)
    needed = Needed(need_x, need_weight, need_bias)
    gradients = _new_gradients(x, weight, needed, sum_dtype)
    if not target.numel():
        _zero(gradients)
    for chunk, logits in _chunks(x, weight, bias, chunk_rows):
        form.write_gradient(logits, target[chunk], stats[:, chunk], upstream[:, chunk], loss, statistic)
        _add_gradients(logits, x, weight, chunk, needed, gradients)
    return gradients


def _empty_scan_backward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    *,
    need_x: bool,
    need_weight: bool,
    need_bias: bool,
    sum_dtype: torch.dtype,
    **_,
) -> Gradients:
    return _new_gradients(x, weight, Needed(need_x, need_weight, need_bias), sum_dtype)


def _scaled_gradient(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    return logits_module(triton).scaled(gradient, factor, dtype)


def _empty_scaled(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _linear_add_weight_grad(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    out: torch.Tensor,
    *,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    softcap: float,
    statistic: int,
    chunk_rows: int,
    triton: bool,
) -> None:
    """Add the gradient of the weight to out [V, D]."""
    loss, form = LossOptions(ignore_index, label_smoothing, z_loss, softcap), logits_module(triton)
    for chunk, logits in _chunks(x, weight, bias, chunk_rows):
        form.write_gradient(logits, target[chunk], stats[:, chunk], upstream[:, chunk], loss, statistic)
        accumulate(out, logits.t(), x[chunk], overwrite=False)


linear_scan_backward = define(_linear_scan_backward, _empty_scan_backward)
linear_add_weight_grad = define(_linear_add_weight_grad, mutates=("out",))
scaled_gradient = define(_scaled_gradient, _empty_scaled)
