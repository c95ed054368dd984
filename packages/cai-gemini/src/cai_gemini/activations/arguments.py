"""A block's arguments that it writes to: objects that are neither tensors nor lists of such, and tensors.

A cache of keys and values is one: the block that is run again must find it as it was, without its own entries.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError

_LOOKED_AT = 10_000


def is_opaque(value: Any) -> bool:
    """Whether a value may have tensors in it that nobody else looks at."""
    return hasattr(value, "__dict__") and not (callable(value) or isinstance(value, torch.Tensor | nn.Module))


def copy_of(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """A copy of an object and of the objects, lists and dicts in it; tensors and all else are the same."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)]
    if is_opaque(value):
        memo[id(value)] = copied = copy.copy(value)
        vars(copied).update({name: copy_of(member, memo) for name, member in vars(value).items()})
    elif isinstance(value, dict):
        memo[id(value)] = copied = copy.copy(value)
        copied.update({key: copy_of(entry, memo) for key, entry in value.items()})
    elif type(value) in (list, tuple):
        memo[id(value)] = copied = type(value)(copy_of(entry, memo) for entry in value)
    else:
        return copy.copy(value) if isinstance(value, set | bytearray) else value
    return copied


def is_written(value: Any, before: Any) -> bool:
    """Whether an object has other contents than its copy from before: tensors, numbers, lengths."""
    both = zip(_contents(value, set()), _contents(before, set()), range(_LOOKED_AT), strict=False)
    return any(now != then for now, then, _ in both)


def _contents(value: Any, visited: set[int]) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield id(value)
    elif value is None or isinstance(value, bool | int | float | str):
        yield value
    elif id(value) not in visited:
        visited.add(id(value))
        yield type(value), len(value) if isinstance(value, Mapping | list | tuple | set) else 0
        inside = (
            value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        )
        for member in (*inside, *(vars(value).values() if is_opaque(value) else ())):
            yield from _contents(member, visited)


def values_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor | None]:
    """Copies of tensors' values; None where there are none to look at."""
    return [tensor.detach().clone() if _has_values(tensor) else None for tensor in tensors]


def _has_values(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return plain and not tensor.is_meta and not torch.compiler.is_compiling()


def check_values(tensors: Sequence[torch.Tensor], before: Sequence[torch.Tensor | None]) -> None:
    """Raise `PlanError` where tensors have other values than before, which a write past their versions leaves."""
    for tensor, then in zip(tensors, before, strict=True):
        if then is None:
            continue
        now = tensor.detach()
        if not bool(((now == then) | ((now != now) & (then != then))).all()):
            raise PlanError(
                "an input of a block was changed in place by the block itself",
                got=f"another value in a tensor of shape {tuple(tensor.shape)}",
                cause="the block is run again in backward, from its inputs",
                fix="change a copy instead, as with x = x + y in place of x += y or x.data.add_(y)",
            )
