"""Channels last in memory, from layer to layer: what convolutions on tensor cores compute on.

Each compiled layer hands on what eager code would: torch's group norm puts channels first, so every layer would turn its
result and the next one turn it back. Here layers hand on channels last. Weights stay stored as they are: a graph turns
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


def keep_channels_last(layers: Iterable[nn.Module]) -> None:
    """Let layers that will be compiled return images [n, c, h, w] with channels last, in place."""
    for layer in layers:
        for module in layer.modules():
            if type(module) is nn.Conv2d and module.kernel_size != (1, 1):  # those are the same either way
                module.forward = types.MethodType(_convolution, module)  # type: ignore[method-assign]
        layer.forward = types.MethodType(_layer, layer)  # type: ignore[method-assign]


def _convolution(self: nn.Conv2d, input: Tensor) -> Tensor:
    return self._conv_forward(input, _Turned.apply(self.weight), self.bias)


def _layer(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    found = type(self).forward(self, *args, **kwargs)
    return tuple(map(_last, found)) if isinstance(found, tuple) else _last(found)


def _last(value: Any) -> Any:
    image = isinstance(value, Tensor) and value.dim() == 4
    return value.contiguous(memory_format=torch.channels_last) if image else value
