"""Functions as operators of torch's dispatcher: a compiled graph calls them and does not look inside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["operator"]

_KEPT: list[torch.library.Library] = []
"""A definition goes away with its library."""


def operator(
    name: str, *, fake: Callable[..., Any], mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as an operator; calls of it cost the host a few microseconds.

    `torch.library.custom_op` does the same for some twenty, spent on checks and on autograd, which these have none of.

    Args:
        name: "namespace::name".
        fake: takes the same arguments; returns empty tensors with the shapes, dtypes and strides of the results.
        mutates: names of the arguments that are written to.

    The function's annotations are the schema. It returns new tensors, never an argument. Not differentiable.
    """
    namespace, _, op_name = name.partition("::")

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        library = torch.library.Library(namespace, "FRAGMENT")
        _KEPT.append(library)
        library.define(op_name + torch.library.infer_schema(run, mutates_args=mutates))
        library.impl(op_name, run, "CompositeExplicitAutograd")
        torch.library.register_fake(name, fake, lib=library)
        return getattr(getattr(torch.ops, namespace), op_name).default

    return register
