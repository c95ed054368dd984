"""Where numbers that are not finite begin."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn


@contextmanager
def watched(model: nn.Module) -> Iterator[list[str]]:
    """Inside, the names of modules whose output is not finite, in the order in which their forwards end.

    The first is where it begins. An output has NaN in any of its tensors, or infinity in the first: others may be
    masks.
    """
    broken_modules: list[str] = []

    def look(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            if _is_broken(list(tensors_in(output))):
                broken_modules.append(name)

        return hook

    named = [(name, module) for name, module in model.named_modules() if name]
    hooks = [module.register_forward_hook(look(name)) for name, module in named]
    try:
        yield broken_modules
    finally:
        for hook in hooks:
            hook.remove()


def _is_broken(tensors: list[Tensor]) -> bool:
    wide = [tensor for tensor in tensors if tensor.is_floating_point()]
    return bool(wide) and (
        not bool(torch.isfinite(wide[0]).all()) or any(bool(torch.isnan(tensor).any()) for tensor in wide[1:])
    )


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors in what a module returns: in lists, tuples, mappings and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for element in value.values():
            yield from tensors_in(element)
    elif isinstance(value, list | tuple):
        for element in value:
            yield from tensors_in(element)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
