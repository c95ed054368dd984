"""The linear layers of a model while each request has one token: layers of one input are computed in one launch.

Which layers those are is seen in a forward: plain linear layers that are given the same tensor one after the other, as
those of queries, keys and values. The first of them computes all, and the others hand out what is theirs. A layer that
is given another tensor then computes by itself, so that a forward that goes another way is right too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cai_kernels import skinny_linears, skinny_pays

MOST = 3
"""Layers of one launch."""
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
DTYPES = (torch.bfloat16, torch.float16)


@dataclass
class _Group:
    """Layers of one input, and what has been computed for those that have not been called yet."""

    layers: list[nn.Linear]
    input: Tensor | None = None
    outputs: dict[nn.Linear, Tensor] = field(default_factory=dict)

    def takes(self, layer: nn.Linear, hidden: Tensor) -> bool:
        """Return whether a layer that is given hidden is one of the group."""
        is_alike = (layer.bias is None) == (self.layers[0].bias is None)
        return self.input is hidden and is_alike and len(self.layers) < MOST and layer not in self.layers

    def compute(self, layer: nn.Linear, hidden: Tensor) -> Tensor:
        """Return what a layer makes of hidden."""
        if self.input is hidden and layer in self.outputs:
            return self.outputs.pop(layer)
        rows = hidden.numel() // hidden.shape[-1]
        layers = self.layers if layer is self.layers[0] else [layer]
        if not skinny_pays(rows, [member.out_features for member in layers]):
            layers = [layer]
            if not skinny_pays(rows, [layer.out_features]):
                return F.linear(hidden, layer.weight, layer.bias)
        biases = [member.bias for member in layers if member.bias is not None]
        outputs = skinny_linears(hidden, [member.weight for member in layers], biases)
        self.input, self.outputs = hidden, dict(zip(layers, outputs, strict=True))
        return self.outputs.pop(layer)

    def forget(self) -> None:
        """Let go of the last input and of what nobody has asked for."""
        self.input = None
        self.outputs.clear()


class SharedInputs:
    """The plain linear layers of a model, grouped by their inputs.

    Args:
        model: the model; its layers are as they were outside `together`.
    """

    def __init__(self, model: nn.Module):
        self._model = model
        self._layers: list[nn.Linear] = []
        self._groups: list[_Group] = []

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Inside, forwards of one token a request compute layers of one input together.

        The first finds those, and again the first after other layers have become plain ones, or no longer are.
        """
        layers = [module for module in self._model.modules() if _is_plain(module)]
        if layers != self._layers:
            self._layers, self._groups = [], []
            groups: list[_Group] = []
            with _replaced({layer: _recorder(layer, groups) for layer in layers}):
                yield
            for group in groups:
                group.forget()
            self._layers, self._groups = layers, groups
            return
        try:
            with _replaced(
                {layer: _member(layer, group) for group in self._groups for layer in group.layers}
            ):
                yield
        finally:
            for group in self._groups:
                group.forget()


@contextlib.contextmanager
def _replaced(forwards: dict[nn.Linear, Callable[[Tensor], Tensor]]) -> Iterator[None]:
    """Inside, layers without a forward of their own compute by others."""
    try:
        for layer, forward in forwards.items():
            layer.forward = forward  # type: ignore[method-assign]
        yield
    finally:
        for layer in forwards:
            layer.__dict__.pop("forward", None)


def _recorder(layer: nn.Linear, groups: list[_Group]) -> Callable[[Tensor], Tensor]:
    """Return a layer's forward that notes its input."""

    def forward(hidden: Tensor) -> Tensor:
        if groups and groups[-1].takes(layer, hidden):
            groups[-1].layers.append(layer)
        elif not any(layer in group.layers for group in groups):
            groups.append(_Group([layer], hidden))
        return F.linear(hidden, layer.weight, layer.bias)

    return forward


def _member(layer: nn.Linear, group: _Group) -> Callable[[Tensor], Tensor]:
    return lambda hidden: group.compute(layer, hidden)


def _is_plain(module: nn.Module) -> bool:
    """Return whether a module is a linear layer and nothing more, whose weight is read as it is."""
    if type(module) is not nn.Linear or "forward" in module.__dict__:
        return False
    if any(getattr(module, hooks) for hooks in HOOKS):
        return False
    weight = module.weight
    is_plain = type(weight) in (nn.Parameter, Tensor)
    return is_plain and weight.dtype in DTYPES and weight.is_contiguous()
