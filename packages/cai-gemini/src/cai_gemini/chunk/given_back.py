"""What is shown as the gradient of a parameter between the step that has consumed it and whoever clears it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from cai_mesh.errors import PlanError


def given_back(name: str) -> PlanError:
    """The error of whoever needs gradients that a step has consumed; `name` is that of a parameter."""
    return PlanError(
        "the gradients of a step were given back with it, and are needed again",
        got=f"that of {name!r}",
        cause="a second step, a backward, or a look at gradients before they were cleared; a plain loop would use the "
        "last ones, whose memory is gone under offload",
        fix="zero_grad() after each step; look at gradients, or copy them, before the step; or keep parameters on the "
        "device (cai_zero.shard_optimizer), where gradients stay",
    )


class GivenBack(torch.Tensor):
    """A gradient that was there until the step: it may be cleared, replaced or counted; its values raise `PlanError`.

    Args:
        shape: the shape of the parameter.
        like: any tensor of the gradient's dtype and device.
        name: the parameter's.
        zero: puts a gradient of zeros in its place.
    """

    _name: str
    _zero: Callable[[], None]

    @staticmethod
    def __new__(cls, shape: torch.Size, like: torch.Tensor, name: str, zero: Callable[[], None]) -> GivenBack:
        wrapper = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, shape, dtype=like.dtype, device=like.device
        )
        wrapper._name, wrapper._zero = name, zero
        return wrapper

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GivenBack({self._name!r})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.removeprefix("aten::")
        first = args[0]
        if name in ("detach", "alias"):
            return cls(first.shape, first, first._name, first._zero)
        if name == "detach_":
            return first
        if name in ("zero_", "_foreach_zero_"):
            for tensor in tree_leaves(first):
                if isinstance(tensor, cls):
                    tensor._zero()
                else:
                    tensor.zero_()
            return first if name == "zero_" else None
        raise given_back(
            next(tensor._name for tensor in tree_leaves((args, kwargs)) if isinstance(tensor, cls))
        )
