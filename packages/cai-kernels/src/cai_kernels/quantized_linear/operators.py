"""The operators of the quantized linear layer: the weight in full, the product, and the gradient of its input.

`triton` is False for plain torch. The weight is made again from its codes where it is used, so backward keeps nothing
but codes and scales, which the layer has anyhow.
"""

from __future__ import annotations

from types import ModuleType

import torch

from cai_kernels.ops import define
from cai_kernels.quantized_linear import reference
from cai_kernels.quantized_linear.kinds import features_of


def _forms(triton: bool) -> ModuleType:
    """Return the module with the form that runs."""
    if not triton:
        return reference
    from cai_kernels.quantized_linear import triton as kernels

    return kernels


def _dequantize_weight(
    codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    """codes, scales -> the weight [out, in] in `dtype`."""
    return _forms(triton).dequantize(codes, scales, kind, dtype)


def _empty_weight(
    codes: torch.Tensor, scales: torch.Tensor, kind: str, dtype: torch.dtype, triton: bool
) -> torch.Tensor:
    inputs, outputs = features_of(codes, kind)
    return codes.new_empty(outputs, inputs, dtype=dtype)


def _quantized_linear(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    triton: bool,
) -> torch.Tensor:
    """rows [..., in], bias [out] of the same dtype -> [..., out]."""
    with torch.autocast(rows.device.type, enabled=False):  # the caller has cast
        return _forms(triton).quantized_linear(rows, codes, scales, bias, kind)


def _empty_product(
    rows: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    kind: str,
    triton: bool,
) -> torch.Tensor:
    return rows.new_empty(*rows.shape[:-1], codes.shape[0])


def _quantized_linear_backward(
    upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str, triton: bool
) -> torch.Tensor:
    """upstream [..., out] -> the gradient of the input [..., in]."""
    with torch.autocast(upstream.device.type, enabled=False):
        return _forms(triton).input_gradient(upstream, codes, scales, kind)


def _empty_gradient(
    upstream: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, kind: str, triton: bool
) -> torch.Tensor:
    return upstream.new_empty(*upstream.shape[:-1], features_of(codes, kind)[0])


def _save(ctx, inputs, output) -> None:
    _, codes, scales, _, ctx.kind, ctx.triton = inputs
    ctx.save_for_backward(codes, scales)
    ctx.set_materialize_grads(False)


def _differentiate(ctx, upstream):
    if upstream is None:
        return (None,) * 6
    codes, scales = ctx.saved_tensors
    need_rows, _, _, need_bias, *_ = ctx.needs_input_grad
    rows_grad = (
        quantized_linear_backward(upstream, codes, scales, ctx.kind, ctx.triton) if need_rows else None
    )
    bias_grad = upstream.reshape(-1, upstream.shape[-1]).sum(0) if need_bias else None
    return rows_grad, None, None, bias_grad, None, None


def _save_backward(ctx, inputs, output) -> None:
    _, codes, scales, ctx.kind, ctx.triton = inputs
    ctx.save_for_backward(codes, scales)
    ctx.set_materialize_grads(False)


def _differentiate_backward(ctx, upstream):
    """The gradient of a gradient, which is linear: the product without a bias."""
    if upstream is None or not ctx.needs_input_grad[0]:
        return (None,) * 5
    codes, scales = ctx.saved_tensors
    return quantized_linear(upstream, codes, scales, None, ctx.kind, ctx.triton), *(None,) * 4


dequantize_weight = define(_dequantize_weight, _empty_weight)
quantized_linear_backward = define(
    _quantized_linear_backward,
    _empty_gradient,
    save=_save_backward,
    backward=_differentiate_backward,
    twice=_differentiate_backward,
)
quantized_linear = define(
    _quantized_linear, _empty_product, save=_save, backward=_differentiate, twice=_differentiate
)
