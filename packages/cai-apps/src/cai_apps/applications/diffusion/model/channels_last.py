"""Channels last in memory, from layer to layer: what convolutions on tensor cores compute on.

Each compiled layer hands on what eager code would. torch's group norm puts channels first, so every layer would turn
its result and the next one turn it back; so would convolutions in backward, with what forward has kept for them. Here
layers hand on channels last, and convolutions are given nothing else. Weights stay stored as they are: an operator
turns them as it uses them, and their gradients back.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from cai_mesh.operators import operator


def _convolved_like(
    images: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    features = torch.conv2d(images, weight, None, stride, padding, dilation, groups)
    return features.contiguous(memory_format=torch.channels_last)


@operator("cai_diffusion::convolution", fake=_convolved_like)
def _convolution(
    images: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Tensor:
    """torch's conv2d of images with channels last and a weight, which is turned for it."""
    turned = weight.contiguous(memory_format=torch.channels_last)
    features = torch.conv2d(images, turned, None, stride, padding, dilation, groups)
    return features.contiguous(memory_format=torch.channels_last)


def _gradients_like(
    grad: Tensor, images: Tensor, weight: Tensor,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, need_images: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dimages = (
        torch.empty_like(images, memory_format=torch.channels_last) if need_images else grad.new_empty(0)
    )
    return dimages, torch.empty_like(weight) if need_weight else grad.new_empty(0)


@operator("cai_diffusion::convolution_backward", fake=_gradients_like)
def _gradients(
    grad: Tensor, images: Tensor, weight: Tensor,
    stride: list[int], padding: list[int], dilation: list[int], groups: int, need_images: bool, need_weight: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Gradients of the images, with channels last, and of the weight, as it is stored; empty where not needed."""
    turned = weight.contiguous(memory_format=torch.channels_last)
    needed = [need_images, need_weight, False]
    dimages, dweight, _ = torch.ops.aten.convolution_backward(
        grad, images, turned, None, stride, padding, dilation, False, [0, 0], groups, needed
    )
    dimages = dimages.contiguous(memory_format=torch.channels_last) if need_images else grad.new_empty(0)
    return dimages, dweight.contiguous() if need_weight else grad.new_empty(0)


class _Convolution(torch.autograd.Function):
    """A convolution whose weight is turned in forward and again in backward.

    Done in the graph, Inductor would keep every turned weight until backward: a second copy of them all.
    """

    @staticmethod
    def forward(ctx, images, weight, stride, padding, dilation, groups):
        ctx.save_for_backward(images, weight)
        ctx.options = stride, padding, dilation, groups
        return _convolution(images, weight, stride, padding, dilation, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        need_images, need_weight = ctx.needs_input_grad[:2]
        grad = grad.contiguous(memory_format=torch.channels_last)
        dimages, dweight = _gradients(grad, *ctx.saved_tensors, *ctx.options, need_images, need_weight)
        return dimages if need_images else None, dweight if need_weight else None, None, None, None, None


class _Images(torch.autograd.Function):
    """Images [n, c, h, w] with channels last; their gradient too."""

    @staticmethod
    def forward(ctx, images):
        return images.contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.contiguous(memory_format=torch.channels_last)


def keep_channels_last(layers: Iterable[nn.Module]) -> None:
    """Let layers that will be compiled return images [n, c, h, w] with channels last, in place."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Conv2d:
                module.forward = types.MethodType(_forward, module)  # type: ignore[method-assign]
        layer.forward = types.MethodType(_layer, layer)  # type: ignore[method-assign]


def _forward(self: nn.Conv2d, input: Tensor) -> Tensor:
    images = _Images.apply(input)
    pointwise = self.kernel_size == (1, 1)  # either way
    if pointwise or self.padding_mode != "zeros" or isinstance(self.padding, str):
        return _Images.apply(self._conv_forward(images, self.weight, self.bias))
    options = self.stride, self.padding, self.dilation, self.groups
    features = _Convolution.apply(images, self.weight, *options)
    return features if self.bias is None else features + self.bias[:, None, None]


def _layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    output = type(self).forward(self, *args, **kwargs)
    return tuple(map(_last, output)) if isinstance(output, tuple) else _last(output)


def _last(value: Any) -> Any:
    return _Images.apply(value) if isinstance(value, Tensor) and value.dim() == 4 else value
