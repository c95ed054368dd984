"""How a grouped matmul and the gradient of its weight become operators, whoever computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cai_kernels.ops import define


def differentiable(
    product: Callable[..., torch.Tensor], weight_product: Callable[..., torch.Tensor]
) -> Callable[..., torch.Tensor]:
    """The operator of `product(x, weight, offsets)`, which differentiates by itself and by `weight_product`."""

    def save(ctx, inputs, output) -> None:
        x, weight, offsets = inputs
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight, offsets)

    def differentiate(ctx, dout):
        x, weight, offsets = ctx.saved_tensors
        dx = grouped_matmul(dout, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
        dweight = weight_gradient(x, dout, weight, offsets) if ctx.needs_input_grad[1] else None
        return dx, dweight, None

    weight_gradient = define(weight_product, lambda x, dout, weight, offsets: torch.empty_like(weight))
    grouped_matmul = define(
        product,
        lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[2]),
        save=save,
        backward=differentiate,
    )
    return grouped_matmul
