"""The differentiable operators: how the chunked operators differentiate."""

from __future__ import annotations

import torch

from cai_kernels.cross_entropy.options import ENTROPY
from cai_kernels.errors import KernelError
from cai_kernels.linear_cross_entropy import chunked
from cai_kernels.linear_cross_entropy.options import Needed
from cai_kernels.ops import define

LOSS_OPTIONS = ("ignore_index", "label_smoothing", "z_loss", "softcap")


def _save_fused(ctx, inputs, keyword_only_inputs, output) -> None:
    x, _, _, _ = inputs
    options = keyword_only_inputs
    _, z, dx, dw, db, factor = output
    ctx.save_for_backward(dx, dw, db, factor)
    ctx.mark_non_differentiable(z, dx, dw, db, factor)
    ctx.set_materialize_grads(False)
    ctx.needed = Needed(options["need_x"], options["need_weight"], options["need_bias"])
    ctx.triton, ctx.grad_dtype = options["triton"], options["grad_dtype"]
    ctx.apply_factor = x.dtype == torch.float16
    ctx.compiling, ctx.returned = options["compiling"], False


def _differentiate_fused(ctx, dloss, *_):
    if dloss is None:
        return None, None, None, None
    if ctx.returned:
        raise KernelError(
            "the weight's gradient of this loss was handed out by its first backward",
            fix='use backward="split", which computes it in every backward',
        )
    dx, dw, db, factor = ctx.saved_tensors
    factor = dloss * factor if ctx.apply_factor else dloss
    grad_x = grad_weight = grad_bias = None
    if ctx.needed.x:
        grad_x = chunked.scaled_gradient(dx, factor, dx.dtype, ctx.triton)
    if ctx.needed.weight:
        grad_weight = _scaled_weight_gradient(ctx, dw, factor)
    if ctx.needed.bias:
        grad_bias = chunked.scaled_gradient(db, factor, ctx.grad_dtype, ctx.triton)
    return grad_x, grad_weight, grad_bias, None


def _scaled_weight_gradient(ctx, dw: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """The gradient of the weight. It is large, so where no cast is needed it is scaled in place, which works once."""
    if dw.dtype != ctx.grad_dtype or ctx.compiling:
        return chunked.scaled_gradient(dw, factor, ctx.grad_dtype, ctx.triton)
    ctx.returned = True
    chunked.logits_module(ctx.triton).scale_(dw, factor)
    return dw


def _save_scan(ctx, inputs, keyword_only_inputs, output) -> None:
    x, weight, bias, target = inputs
    _, z, entropy, stats = output
    ctx.save_for_backward(x, weight, bias, target, stats)
    has_entropy = keyword_only_inputs["statistic"] == ENTROPY
    ctx.mark_non_differentiable(z, stats, *(() if has_entropy else (entropy,)))
    ctx.set_materialize_grads(False)
    ctx.grad_dtype = keyword_only_inputs["grad_dtype"]
    names = (*LOSS_OPTIONS, "statistic", "chunk_rows", "triton", "sum_dtype")
    ctx.options = {name: keyword_only_inputs[name] for name in names}


def _differentiate_scan(ctx, dloss, _z, dentropy, _stats):
    need_x, need_weight, need_bias, _ = ctx.needs_input_grad
    needed = Needed(need_x, need_weight, need_bias)
    if not needed or (dloss is None and dentropy is None):
        return None, None, None, None
    x, weight, bias, target, stats = ctx.saved_tensors
    maximum = stats[0]
    upstream = torch.stack([torch.zeros_like(maximum) if d is None else d for d in (dloss, dentropy)])
    dx, dw, db = chunked.linear_scan_backward(
        x, weight, bias, target, stats, upstream, **needed.arguments(), **ctx.options
    )
    return (
        dx if needed.x else None,
        dw.to(ctx.grad_dtype) if needed.weight else None,
        db.to(weight.dtype) if needed.bias else None,
        None,
    )


PLAIN = "compute the logits with torch.nn.functional.linear, and a plain loss of them"
linear_loss_fused = define(
    chunked._linear_loss_fused,
    chunked._empty_fused,
    save=_save_fused,
    backward=_differentiate_fused,
    otherwise=PLAIN,
)
linear_scan = define(
    chunked._linear_scan, chunked._empty_scan, save=_save_scan, backward=_differentiate_scan, otherwise=PLAIN
)
