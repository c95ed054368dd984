"""Channels last in memory, from layer to layer: what convolutions on tensor cores compute on.

Each compiled layer hands on what eager code would. torch's group norm puts channels first, so every layer would turn
its result and the next one turn it back; so would convolutions in backward, with what forward has kept for them. Here
layers hand on channels last, and convolutions are given nothing else. Weights stay stored as they are: a graph turns
them as it uses them, and their gradients back, in kernels of its own.
"""

from __future__ import annotations

import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class _Turned(torch.autograd.Function):
    """A weight with channels last; its gradient with channels first."""

    @staticmethod
    def forward(ctx, weight):
        return weight.contiguous(memory_format=torch.channels_last)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        return grad.contiguous()


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
                module.forward = types.MethodType(_convolution, module)  # type: ignore[method-assign]
        layer.forward = types.MethodType(_layer, layer)  # type: ignore[method-assign]


def _convolution(self: nn.Conv2d, input: Tensor) -> Tensor:
    alike = self.kernel_size == (1, 1)  # either way
    weight = self.weight if alike else _Turned.apply(self.weight)
    return _Images.apply(self._conv_forward(_Images.apply(input), weight, self.bias))


def _layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    found = type(self).forward(self, *args, **kwargs)
    return tuple(map(_last, found)) if isinstance(found, tuple) else _last(found)


def _last(value: Any) -> Any:
    return _Images.apply(value) if isinstance(value, Tensor) and value.dim() == 4 else value
