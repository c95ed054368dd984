"""The linear layer and its loss, a chunk of tokens at a time, as operators: the logits of all tokens never exist.

A chunk is one matrix product into a buffer that is used again, one pass that makes the logits their gradient in place,
and one product each for the gradients of x and weight; the weight's is accumulated in float32. Numbers are (label
smoothing, z-loss, softcap, 0 for none), `how` is (rows of a chunk, 1 for Triton, 1 to accumulate in the
weight's dtype, 1 for a weight gradient as wide as it was accumulated, 1 inside a compiled graph, 1 to keep the logits
of all tokens, see `kept`),
`wanted` adds up X, W and B.
"""

from __future__ import annotations

from types import ModuleType

import torch

from cai_kernels.linear_cross_entropy import rows
from cai_kernels.ops import define

X, W, B = 1, 2, 4
Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def chunk_rows(tokens: int, columns: int, width: int, limit: int) -> int:
    """Tokens of a chunk: equal chunks, as few as keep its logits, `width` bytes each, within `limit` bytes."""
    most = max(limit // (columns * width), 1)
    if most >= tokens:
        return max(tokens, 1)
    step = 128 if most >= 128 else 1
    most -= most % step
    chunks = -(-tokens // most)
    even = -(-tokens // chunks)
    return even + -even % step


def form_of(triton: bool) -> ModuleType:
    """The module that treats a chunk of logits."""
    if not triton:
        return rows
    from cai_kernels.linear_cross_entropy import triton as kernels

    return kernels


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _logits(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor
) -> torch.Tensor:
    out = out[: x.shape[0]]
    return torch.mm(x, weight.t(), out=out) if bias is None else torch.addmm(bias, x, weight.t(), out=out)


def accumulate(total: torch.Tensor, left: torch.Tensor, x: torch.Tensor, fresh: bool) -> None:
    """total = left @ x, added unless `fresh`; a float32 total of narrower factors rounds nothing."""
    if total.dtype == x.dtype:
        torch.mm(left, x, out=total) if fresh else total.addmm_(left, x)
    elif total.is_cuda and total.dtype == torch.float32:
        if fresh:
            torch.mm(left, x, out_dtype=torch.float32, out=total)
        else:
            torch.addmm(total, left, x, out_dtype=torch.float32, out=total)
    else:
        left, x = left.to(total.dtype), x.to(total.dtype)
        torch.mm(left, x, out=total) if fresh else total.addmm_(left, x)


def _new_gradients(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, wanted: int, how: list[int]
) -> Gradients:
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted & X else x.new_empty(0)
    dtype = weight.dtype if how[2] or how[5] else _wide(weight.dtype)
    dw = weight.new_empty(weight.shape if wanted & W else (0,), dtype=dtype)
    db = weight.new_empty(weight.shape[:1] if wanted & B else (0,), dtype=_wide(weight.dtype))
    return dx, dw, db


def _spread(
    logits: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, start: int, wanted: int, gradients: Gradients
) -> None:
    """Take the gradient of a chunk's logits on to x, weight and bias."""
    dx, dw, db = gradients
    n = logits.shape[0]
    if wanted & X:
        torch.mm(logits, weight, out=dx[start : start + n])
    if wanted & W:
        accumulate(dw, logits.t(), x, fresh=start == 0)
    if wanted & B:
        total = logits.sum(0, dtype=db.dtype)
        db.copy_(total) if start == 0 else db.add_(total)


def _linear_loss_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    numbers: list[float],
    wanted: int,
    how: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], weight [V, D], target [T] -> (loss, z-loss, dx, dw, db, factor still missing on these).

    float16 leaves the factor 1/tokens of a mean to the backward: its logits' gradients would vanish under it.
    """
    from cai_kernels.linear_cross_entropy import kept

    form, tokens, late = form_of(bool(how[1])), target.numel(), x.dtype == torch.float16
    out = torch.zeros(2, tokens, dtype=_wide(x.dtype), device=x.device)
    scale = torch.ones((), dtype=out.dtype, device=x.device)
    if mean:
        scale = scale / (target != ignore_index).sum()
    inside, missing = (torch.ones_like(scale), scale) if late else (scale, torch.ones_like(scale))
    gradients = _new_gradients(x, weight, bias, wanted, how)
    if not tokens:
        for gradient in gradients:
            gradient.zero_()
    if how[5]:
        inputs = (x, weight, bias, target)
        kept.loss_and_gradients(inputs, inside, out, ignore_index, numbers, gradients, wanted)
        loss, z = (out.sum(1) * scale).unbind(0)
        return loss.clone(), z.clone(), *gradients, missing
    buffer = x.new_empty(min(how[0], tokens), weight.shape[0])
    for start in range(0, tokens, how[0]):
        here = slice(start, start + how[0])
        logits = _logits(x[here], weight, bias, buffer)
        form.loss_and_gradient(logits, target[here], inside, out[:, here], ignore_index, numbers)
        _spread(logits, x[here], weight, start, wanted, gradients)
    loss, z = (out.sum(1) * scale).unbind(0)
    return loss.clone(), z.clone(), *gradients, missing


def _empty_fused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    mean: bool,
    numbers: list[float],
    wanted: int,
    how: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    scalars = [x.new_empty((), dtype=_wide(x.dtype)) for _ in range(3)]
    return scalars[0], scalars[1], *_new_gradients(x, weight, bias, wanted, how), scalars[2]


def _linear_scan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
    how: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x [T, D], weight [V, D], target [T] -> (losses, z-losses, entropies, each [T], and stats [4, T])."""
    form, tokens = form_of(bool(how[1])), target.numel()
    stats = torch.empty(4, tokens, dtype=_wide(x.dtype), device=x.device)
    buffer = x.new_empty(min(how[0], tokens), weight.shape[0])
    for start in range(0, tokens, how[0]):
        here = slice(start, start + how[0])
        logits = _logits(x[here], weight, bias, buffer)
        stats[:, here] = form.scan(logits, target[here], ignore_index, numbers[2], aux)
    return *rows.losses(stats, target, ignore_index, weight.shape[0], numbers), stats


def _empty_scan(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
    how: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    stats = x.new_empty((4, target.numel()), dtype=_wide(x.dtype))
    return (
        stats.new_empty(target.numel()),
        stats.new_empty(target.numel()),
        stats.new_empty(target.numel()),
        stats,
    )


def _linear_scan_backward(
    inputs: list[torch.Tensor],
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
    wanted: int,
    how: list[int],
) -> Gradients:
    """Gradients of inputs (x, weight, perhaps bias), logits computed again; upstream [2, T] of losses and entropies."""
    x, weight, bias = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None
    form, tokens = form_of(bool(how[1])), target.numel()
    gradients = _new_gradients(x, weight, bias, wanted, how)
    if not tokens:
        for gradient in gradients:
            gradient.zero_()
    buffer = x.new_empty(min(how[0], tokens), weight.shape[0])
    for start in range(0, tokens, how[0]):
        here = slice(start, start + how[0])
        logits = _logits(x[here], weight, bias, buffer)
        form.write_gradient(
            logits, target[here], stats[:, here], upstream[:, here], ignore_index, numbers, aux
        )
        _spread(logits, x[here], weight, start, wanted, gradients)
    return gradients


def _empty_scan_backward(
    inputs: list[torch.Tensor],
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
    wanted: int,
    how: list[int],
) -> Gradients:
    return _new_gradients(inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None, wanted, how)


def _scaled_gradient(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    return form_of(triton).scaled(gradient, factor, dtype)


def _empty_scaled(
    gradient: torch.Tensor, factor: torch.Tensor, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    return torch.empty_like(gradient, dtype=dtype)


def _linear_add_weight_grad(
    inputs: list[torch.Tensor],
    target: torch.Tensor,
    stats: torch.Tensor,
    upstream: torch.Tensor,
    out: torch.Tensor,
    ignore_index: int,
    numbers: list[float],
    aux: int,
    how: list[int],
) -> None:
    """Add the weight's gradient to out [V, D]."""
    x, weight, bias = inputs[0], inputs[1], inputs[2] if len(inputs) > 2 else None
    form, tokens = form_of(bool(how[1])), target.numel()
    buffer = x.new_empty(min(how[0], tokens), weight.shape[0])
    for start in range(0, tokens, how[0]):
        here = slice(start, start + how[0])
        logits = _logits(x[here], weight, bias, buffer)
        form.write_gradient(
            logits, target[here], stats[:, here], upstream[:, here], ignore_index, numbers, aux
        )
        accumulate(out, logits.t(), x[here], fresh=False)


linear_scan_backward = define(_linear_scan_backward, _empty_scan_backward)
linear_add_weight_grad = define(_linear_add_weight_grad, mutates=("out",))
scaled_gradient = define(_scaled_gradient, _empty_scaled)
