"""The arguments and return values of modules in one forward of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Slot = int | str
"""The place of an argument: a position, or a keyword."""


@dataclass(frozen=True)
class Observed:
    """One call of a module, with its arguments and what it returned."""

    name: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    @property
    def changes_shape(self) -> bool:
        """Whether the output is not a tensor of the shape of the first tensor given."""
        first_tensor = next((value for _, value in slots_of(self) if isinstance(value, torch.Tensor)), None)
        same = isinstance(self.output, torch.Tensor) and first_tensor is not None
        return not same or self.output.shape != first_tensor.shape  # type: ignore[union-attr]


def observe(model: nn.Module, names: Sequence[str], inputs: Mapping[str, Any]) -> list[Observed]:
    """Run `model(**inputs)` once.

    Returns:
        the calls of the modules named, in the order in which they ended.
    """
    calls: list[Observed] = []

    def record(name: str) -> Callable[..., None]:
        return lambda module, args, kwargs, output: calls.append(Observed(name, args, dict(kwargs), output))

    hooks = [
        model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True) for name in names
    ]
    try:
        model(**inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def slots_of(call: Observed) -> Iterator[tuple[Slot, Any]]:
    """A call's arguments with their places."""
    yield from enumerate(call.args)
    yield from call.kwargs.items()
