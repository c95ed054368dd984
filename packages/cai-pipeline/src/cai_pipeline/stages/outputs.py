"""The output of the last stage of a pipeline, without what only the whole model has."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableMapping
from typing import Any, NoReturn

import torch

from cai_mesh.errors import PlanError


def _refuse(self: NotHere, *_: Any, **__: Any) -> NoReturn:
    raise PlanError(
        f"the last stage of a pipeline does not have the model's {object.__getattribute__(self, 'name')!r}",
        cause="it is made from all layers, and this rank has only its own",
        fix="compute the loss from what the last layer gives (loss, logits)",
    )


class NotHere:
    """Stands for an entry of what the whole model returns; whatever is done with it raises `PlanError`."""

    def __init__(self, name: str):
        object.__setattr__(self, "name", name)

    def __repr__(self) -> str:
        return f"NotHere({object.__getattribute__(self, 'name')!r})"

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        _refuse(next(a for a in (*args, *(kwargs or {}).values(), cls("output")) if isinstance(a, cls)))

    __getitem__ = __iter__ = __len__ = __bool__ = __float__ = __call__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __neg__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        _refuse(self)


def without(output: Any, missing: Collection[str]) -> Any:
    """`output` with `NotHere` in place of the entries named, and of those that are neither tensors nor plain values.

    Args:
        output: a mapping, a tuple or list (entries by position), or anything else, which stays as it is.
        missing: names of entries.
    """
    if isinstance(output, MutableMapping):
        for name, value in list(output.items()):
            if name in missing or not _is_plain(value):
                output[name] = NotHere(str(name))
    elif type(output) in (tuple, list):
        return type(output)(
            NotHere(str(place)) if str(place) in missing or not _is_plain(value) else value
            for place, value in enumerate(output)
        )
    return output


def _is_plain(value: Any) -> bool:
    """Whether a trial sees all tensors in it."""
    if isinstance(value, tuple | list):
        return all(map(_is_plain, value))
    if isinstance(value, MutableMapping):
        return all(map(_is_plain, value.values()))
    return value is None or isinstance(value, torch.Tensor | bool | int | float | str)
