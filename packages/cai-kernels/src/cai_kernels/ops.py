"""Register the operators of this package with torch's dispatcher, with little host overhead per call.

A `torch.library.custom_op` costs tens of microseconds a call, a definition in a `Library` a few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("cai_kernels", "DEF")


def define(
    run: Callable[..., Any],
    fake: Callable[..., Any] | None = None,
    *,
    name: str = "",
    mutates: Sequence[str] = (),
    save: Callable[..., None] | None = None,
    backward: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """Register `run` as the operator `cai_kernels::name` and return that.

    Args:
        run: launches kernels on real tensors; its annotations are the operator's schema. It returns new tensors,
            never an argument.
        fake: takes the same arguments; returns empty tensors with the results' shapes, dtypes and strides. None for
            an operator that only writes into its arguments.
        name: by default the name of `run`.
        mutates: names of the arguments `run` writes into.
        save: `(ctx, inputs, output)`, or `(ctx, inputs, keyword_only_inputs, output)` if `run` has keyword-only
            arguments; keeps what backward needs.
        backward: `(ctx, *gradients)`, returns a gradient or None for every positional argument. Calls operators, not
            kernels.
    """
    name = name or run.__name__.lstrip("_")
    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=mutates))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cai_kernels::{name}", fake or (lambda *_, **__: None), lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(f"cai_kernels::{name}", backward, setup_context=save, lib=_LIBRARY)
    return getattr(torch.ops.cai_kernels, name).default
