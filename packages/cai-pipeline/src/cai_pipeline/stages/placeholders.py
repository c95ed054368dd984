"""Placeholders for the modules of other stages: no parameters, and outputs of the right shapes."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree

from cai_pipeline.stages.boundary import StageIO
from cai_pipeline.stages.structure import LayerList

Role = Literal["input", "output", "pass"]
"""The work of a placeholder layer on the hidden states."""


class Placeholder(nn.Module):
    """Stands for a module of another stage: the same plain attributes, no parameters.

    While the stage runs, its parameters can be looked at, as code does that asks for a dtype: they are zeros that take
    no memory.
    """

    def __init__(self, replaced: nn.Module, io: StageIO):
        super().__init__()
        self.io = io
        self.replaced = type(replaced).__name__
        self.shapes = {name: tuple(p.shape) for name, p in replaced._parameters.items() if p is not None}
        for name, value in vars(replaced).items():
            is_reserved = name.startswith("_") or name in self.__dict__ or name == "forward"
            if not is_reserved and not isinstance(value, torch.Tensor):
                self.__dict__[name] = value

    def __getattr__(self, name: str) -> Any:
        attributes = self.__dict__
        if name in attributes.get("shapes", ()) and attributes["io"].travelling:
            return attributes["io"].zeros(attributes["shapes"][name])
        return super().__getattr__(name)

    def extra_repr(self) -> str:
        return self.replaced


class PlaceholderLayer(Placeholder):
    """A layer of another stage: returns its hidden states, or connects the stage to a neighbour.

    Args:
        layers: the list the layer is in: what its layers return, and what they hand on beside the hidden states.
        role: "input" for the layer just before the stage's own: it returns the received tensors. "output" for the
            layer just after them: its input is the stage's output. "pass" for all others.
    """

    def __init__(self, replaced: nn.Module, io: StageIO, layers: LayerList, role: Role):
        super().__init__(replaced, io)
        self.outputs = layers.outputs
        self.carried = layers.carried
        self.role = role

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        extra_outputs: list[torch.Tensor | None] = [None] * ((self.outputs or 1) - 1)
        if self.role == "input":
            hidden, *received = self.io.read("hidden states")
            for carried, tensor in zip(self.carried, received, strict=False):
                extra_outputs[carried.output - 1] = tensor
        elif self.role == "output":
            self.io.require_running()
            self.io.send(hidden, *(carried_tensor.of(args, kwargs) for carried_tensor in self.carried))
            hidden = hidden.detach()
        return hidden if self.outputs is None else (hidden, *extra_outputs)


class PlaceholderLinear(Placeholder):
    """A linear layer of another stage: returns zeros of the right shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.new_zeros(()).expand(*x.shape[:-1], self.out_features)


class PlaceholderPassThrough(Placeholder):
    """A norm or head of another stage: returns its input. Its parts are such placeholders too, to be looked at."""

    def __init__(self, replaced: nn.Module, io: StageIO):
        super().__init__(replaced, io)
        for name, part in replaced.named_children():
            self.add_module(name, PlaceholderPassThrough(part, io))

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return x


class PlaceholderShaped(Placeholder):
    """A module of another stage that changes shapes (patches, convolutions): returns zeros of its output's shape.

    A copy without values says which shapes the outputs have. Its parts are such placeholders too.
    """

    def __init__(self, replaced: nn.Module, io: StageIO):
        super().__init__(replaced, io)
        original = without_values(replaced)
        self.__dict__["original"] = (original,)  # in a tuple, so that it is no part of the model
        self.__dict__["made"] = (None, None)
        for name, part in original.named_children():
            self.add_module(name, PlaceholderShaped(part, io))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves, shape = _pytree.tree_flatten((args, kwargs))
        signature = [tuple(x.shape) if isinstance(x, torch.Tensor) else x for x in leaves]
        if self.made[0] != signature:
            meta_args, meta_kwargs = _pytree.tree_unflatten([self._shown(x) for x in leaves], shape)
            with torch.no_grad():
                self.__dict__["made"] = signature, self.original[0](*meta_args, **meta_kwargs)
        return _pytree.tree_map_only(torch.Tensor, self._zeros, self.made[1])

    def _shown(self, value: Any) -> Any:
        """A value as the copy takes it: tensors without values, floating-point ones in the dtype of its parameters."""
        if not isinstance(value, torch.Tensor):
            return value
        parameter_dtype = next(
            (p.dtype for p in self.original[0].parameters() if p.is_floating_point()), value.dtype
        )
        dtype = parameter_dtype if value.is_floating_point() else value.dtype
        return torch.empty(value.shape, dtype=dtype, device="meta")

    def _zeros(self, tensor: torch.Tensor) -> torch.Tensor:
        zeros = self.io.zeros(tensor.shape)
        return zeros if tensor.is_floating_point() else zeros.to(tensor.dtype)


class PlaceholderEmbedding(PlaceholderShaped):
    """An embedding of another stage: returns zeros with a shape of its first tensor's, and one more dim.

    Without a tensor, as where positions are embedded for a length, it is a module that changes shapes.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        ids = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
        if ids is None:
            return super().forward(*args, **kwargs)
        return self.io.zeros((*ids.shape, self.embedding_dim))


def without_values(module: nn.Module) -> nn.Module:
    """A copy on the meta device, in evaluation mode; the values are not copied on the way."""
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), False) for p in module.parameters()}
    memo |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    return copy.deepcopy(module, memo).eval()
