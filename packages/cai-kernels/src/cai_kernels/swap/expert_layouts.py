"""The parameters of a layer of experts: which matrix is which, how it lies, and a small layer of the same class."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from cai_kernels.swap.structure import Guard, is_plain, is_torchs

ARGUMENTS = 3
"""A layer of experts is called with tokens, the experts that each visits, and their weights."""

WIDE, INNER, EXPERTS = 6, 5, 4
"""Sizes of a small layer: of a token, of one half of an expert's rows, and the number of experts."""


@dataclass(frozen=True)
class ExpertLayout:
    """The names of a layer's parameters by what they are to `expert_layer`.

    Args:
        up, down: the two matrices of each expert.
        up_turned, down_turned: whether they are held as [E, F, D] and [E, D, I], columns first.
        up_bias, down_bias: the biases after them, [E, F] and [E, D]; None: there is none.
        is_gated: whether F is 2 I, and not I.
    """

    up: str
    down: str
    up_turned: bool
    down_turned: bool
    up_bias: str | None
    down_bias: str | None
    is_gated: bool

    def matrices(self, layer: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (up [E, D, F], down [E, I, D]) of a layer, views of its parameters."""
        up, down = layer._parameters[self.up], layer._parameters[self.down]
        assert up is not None and down is not None
        return (
            up.transpose(1, 2) if self.up_turned else up,
            down.transpose(1, 2) if self.down_turned else down,
        )

    def biases(self, layer: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Return (up_bias [E, F], down_bias [E, D]) of a layer."""
        return (
            None if self.up_bias is None else layer._parameters[self.up_bias],
            None if self.down_bias is None else layer._parameters[self.down_bias],
        )

    def shapes(self, experts: int, wide: int, inner: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the parameters for E, D and I."""
        columns = 2 * inner if self.is_gated else inner
        shapes: dict[str, tuple[int, ...]] = {
            self.up: (experts, columns, wide) if self.up_turned else (experts, wide, columns),
            self.down: (experts, wide, inner) if self.down_turned else (experts, inner, wide),
        }
        biases = {self.up_bias: (experts, columns), self.down_bias: (experts, wide)}
        return shapes | {name: shape for name, shape in biases.items() if name is not None}


def counter_of(module: nn.Module) -> str | None:
    """Return the attribute that counts the experts of what looks like a layer of them; None for any other module."""
    params = [param for param in module._parameters.values() if param is not None]
    counts = {len(param) for param in params if param.dim() == 3}
    if len(counts) != 1 or len(arguments_of(module)) != ARGUMENTS:
        return None
    (experts,) = counts
    counters = (name for name, value in vars(module).items() if name.endswith("experts") and value == experts)
    return next(counters, None)


def arguments_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the positional arguments of a module's forward."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(type(module).forward).parameters
    return tuple(name for name, parameter in parameters.items() if parameter.kind in kinds)[1:]


def layouts_of(module: nn.Module) -> Iterator[ExpertLayout]:
    """Yield the layouts that the shapes of a layer's parameters allow."""
    params = {name: param for name, param in module._parameters.items() if param is not None}
    matrices = [name for name, param in params.items() if param.dim() == 3]
    biases: list[str | None] = [name for name, param in params.items() if param.dim() == 2]
    if len(matrices) != 2 or len(biases) > 2 or len(params) != len(matrices) + len(biases):
        return
    shapes = {name: tuple(param.shape) for name, param in params.items()}
    experts = len(params[matrices[0]])
    turns = (True, False)
    pairs = itertools.permutations([*biases, None, None][:2] if len(biases) != 1 else [*biases, None])
    options = itertools.product(itertools.permutations(matrices), turns, turns, dict.fromkeys(pairs), turns)
    for (up, down), up_turned, down_turned, (up_bias, down_bias), is_gated in options:
        layout = ExpertLayout(up, down, up_turned, down_turned, up_bias, down_bias, is_gated)
        wide, inner = shapes[down][1:] if down_turned else shapes[down][:0:-1]
        if layout.shapes(experts, wide, inner) == shapes:
            yield layout


def small_layer(module: nn.Module, layout: ExpertLayout, counter: str) -> nn.Module:
    """Return a layer of the same class with small random parameters in float64, which shares what else it has."""
    small = copy.copy(module)
    shapes = layout.shapes(EXPERTS, WIDE, INNER)
    random = torch.Generator().manual_seed(0)
    small.__dict__.pop("forward", None)
    small.__dict__["_parameters"] = {
        name: nn.Parameter(torch.randn(shape, generator=random, dtype=torch.float64))
        for name, shape in shapes.items()
    }
    sizes = dict(zip(_sizes(module, layout), (WIDE, INNER, 2 * INNER), strict=True))
    for name, value in vars(module).items():
        if type(value) is int and name != counter and value in sizes:
            small.__dict__[name] = sizes[value]
    small.__dict__[counter] = EXPERTS
    config = vars(module).get("config")
    if hasattr(config, "_experts_implementation"):  # of transformers: the forward of the class itself
        small.__dict__["config"] = copy.copy(config)
        small.__dict__["config"]._experts_implementation = "eager"
    return small


def _sizes(module: nn.Module, layout: ExpertLayout) -> tuple[int, int, int]:
    _, down = layout.matrices(module)
    return down.shape[2], down.shape[1], 2 * down.shape[1]


def guard_of(module: nn.Module, counter: str) -> Guard:
    """Return the plain values and functions of a layer and its children, but for the number of its experts."""
    attributes = [(name, value) for name, value in _settings(module) if name != counter]
    for child_name, child in module.named_children():
        attributes.append((f"{child_name}.__class__", type(child)))
        attributes += [(f"{child_name}.{name}", value) for name, value in _settings(child)]
    return Guard(tuple(attributes))


def _settings(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        is_setting = is_plain(value) or (callable(value) and is_torchs(value))
        if is_setting and not name.startswith("_") and name not in ("training", "forward"):
            yield name, value
