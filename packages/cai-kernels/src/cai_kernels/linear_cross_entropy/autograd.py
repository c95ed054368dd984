"""How the chunked operators differentiate."""

from __future__ import annotations

import torch

from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import chunked
from cai_kernels.linear_cross_entropy.chunked import B, W, X
from cai_kernels.linear_cross_entropy.rows import ENTROPY
from cai_kernels.ops import define


def _save_fused(ctx, inputs, output) -> None:
    x, weight, _, _, _, _, _, wanted, how = inputs
    _, z, dx, dw, db, missing = output
    ctx.save_for_backward(dx, dw, db, missing)
    ctx.mark_non_differentiable(z, dx, dw, db, missing)
    ctx.set_materialize_grads(False)
    ctx.wanted, ctx.triton, ctx.late = wanted, bool(how[1]), x.dtype == torch.float16
    ctx.dtype = dw.dtype if how[3] else weight.dtype
    ctx.traced, ctx.handed_out = bool(how[4]), False


def _differentiate_fused(ctx, dloss, *_):
    if dloss is None:
        return (None,) * 9
    if ctx.handed_out:
        raise KernelError(
            "the weight's gradient of this loss was handed out by its first backward",
            fix='use backward="split", which computes it in every backward',
        )
    dx, dw, db, missing = ctx.saved_tensors
    factor = dloss * missing if ctx.late else dloss
    grads: list[torch.Tensor | None] = [None, None, None]
    if ctx.wanted & X:
        grads[0] = chunked.scaled_gradient(dx, factor, dx.dtype, ctx.triton)
    if ctx.wanted & W:
        grads[1] = _hand_out(ctx, dw, factor)
    if ctx.wanted & B:
        grads[2] = chunked.scaled_gradient(db, factor, ctx.dtype, ctx.triton)
    return *grads, *(None,) * 6


def _hand_out(ctx, dw: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The weight's gradient: scaled where it lies if it has its last dtype, as it is large; then only once."""
    if dw.dtype != ctx.dtype or ctx.traced:
        return chunked.scaled_gradient(dw, factor, ctx.dtype, ctx.triton)
    ctx.handed_out = True
    chunked.form_of(ctx.triton).scale_(dw, factor)
    return dw


def _save_scan(ctx, inputs, output) -> None:
    x, weight, bias, target, ignore_index, numbers, aux, how = inputs
    _, z, entropy, stats = output
    ctx.save_for_backward(x, weight, bias, target, stats)
    ctx.mark_non_differentiable(z, stats, *(() if aux == ENTROPY else (entropy,)))
    ctx.set_materialize_grads(False)
    ctx.options, ctx.aux, ctx.how = (ignore_index, numbers), aux, how


def _differentiate_scan(ctx, dloss, _z, dentropy, _stats):
    wanted = sum(bit for bit, need in zip((X, W, B), ctx.needs_input_grad, strict=False) if need)
    if not wanted or (dloss is None and dentropy is None):
        return (None,) * 8
    x, weight, bias, target, stats = ctx.saved_tensors
    upstream = torch.stack([torch.zeros_like(stats[0]) if d is None else d for d in (dloss, dentropy)])
    inputs = [x, weight] if bias is None else [x, weight, bias]
    dx, dw, db = chunked.linear_scan_backward(
        inputs, target, stats, upstream, *ctx.options, ctx.aux, wanted, ctx.how
    )
    dtype = dw.dtype if ctx.how[3] else weight.dtype
    grads = (dx if wanted & X else None, dw.to(dtype) if wanted & W else None)
    return *grads, db.to(weight.dtype) if wanted & B else None, *(None,) * 5


linear_loss_fused = define(
    chunked._linear_loss_fused, chunked._empty_fused, save=_save_fused, backward=_differentiate_fused
)
linear_scan = define(chunked._linear_scan, chunked._empty_scan, save=_save_scan, backward=_differentiate_scan)
