"""`backward(inputs=...)` with flat parameters: autograd is given the leaves that were used in their place.

A flat parameter is in no graph, and torch passes over such inputs without a word. It offers no hook for them, so
`torch.autograd.backward`, through which `Tensor.backward` goes, is replaced by one that looks at `inputs` first.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch


def leaves_of(inputs: Any) -> tuple[Any, ...]:
    """The tensors that autograd is to accumulate into for these, which may be flat parameters, one or several."""
    given: Iterable[Any] = (inputs,) if isinstance(inputs, torch.Tensor) else inputs
    leaves: list[Any] = []
    for tensor in given:
        if hasattr(tensor, "flat_values") and getattr(tensor, "cai_keeper", None) is not None:
            leaves.append(tensor.cai_keeper.leaf(tensor.cai_index))
        leaves.append(tensor)  # a loss may have read the parameter itself
    return tuple(leaves)


_backward = torch.autograd.backward


@functools.wraps(_backward)
def _backward_to_leaves(*args: Any, **kwargs: Any) -> None:
    if kwargs.get("inputs") is not None and not isinstance(
        kwargs["inputs"], torch.autograd.graph.GradientEdge
    ):
        kwargs["inputs"] = leaves_of(kwargs["inputs"])
    _backward(*args, **kwargs)


torch.autograd.backward = _backward_to_leaves
