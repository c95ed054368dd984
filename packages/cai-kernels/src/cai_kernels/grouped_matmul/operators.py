"""Make differentiable operators of a grouped matmul and the gradient of its weight."""

from __future__ import annotations

from collections.abc import Callable

import torch

from cai_kernels.ops import define

Operator = Callable[..., torch.Tensor]


def differentiable(product: Operator, weight_product: Operator) -> tuple[Operator, Operator]:
    """The operators of both products; the backward of `product(x, weight, offsets)` uses both."""

    def save(ctx, inputs, output) -> None:
        x, weight, offsets = inputs
        _, need_weight, *_ = ctx.needs_input_grad
        ctx.save_for_backward(x if need_weight else None, weight, offsets)

    def differentiate(ctx, dout):
        x, weight, offsets = ctx.saved_tensors
        need_x, need_weight, _ = ctx.needs_input_grad
        dx = grouped_matmul(dout, weight.transpose(1, 2), offsets) if need_x else None
        dweight = weight_gradient(x, dout, weight, offsets) if need_weight else None
        return dx, dweight, None

    weight_gradient = define(weight_product, lambda x, dout, weight, offsets: torch.empty_like(weight))
    grouped_matmul = define(
        product,
        lambda x, weight, offsets: x.new_empty(x.shape[0], weight.shape[2]),
        save=save,
        backward=differentiate,
    )
    return grouped_matmul, weight_gradient
