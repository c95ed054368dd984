"""`backward(inputs=...)` of parameters in whose place a block computes with others.

torch reaches the leaves that it is given. A shard is in no graph, or only where a loss reads it; its block computes
with the gathered parameter. So both are given in its place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge


class _Input(torch.Tensor):
    """A tensor that says whether it was asked."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func is torch.autograd.backward


@functools.cache
def backward_asks_inputs() -> bool:
    """Whether this torch lets the class of an input of `backward` say what is reached, as torch 2.13 does."""
    try:
        answer: Any = torch.autograd.backward(
            torch.zeros(()), inputs=(torch.Tensor._make_subclass(_Input, torch.zeros(())),)
        )
    except RuntimeError:  # a backward of a constant was begun
        return False
    return answer is True


def backward_to_used(*args: Any, **kwargs: Any) -> None:
    """Run `torch.autograd.backward` with what blocks compute with in place of the parameters among `inputs`.

    Args:
        args, kwargs: those of `torch.autograd.backward`; `inputs` by name, as torch hands them on.
    """
    reached: list[torch.Tensor | GradientEdge] = []
    for value in kwargs["inputs"] or ():
        keeper = getattr(value, "cai_keeper", None)
        if keeper is None:
            reached.append(value)
            continue
        reached.append(keeper.leaf(value.cai_index))
        if value.requires_grad:
            with torch._C.DisableTorchFunctionSubclass():
                reached.append(get_gradient_edge(value))
    torch.autograd.backward(*args, **kwargs | {"inputs": tuple(reached) or None})
