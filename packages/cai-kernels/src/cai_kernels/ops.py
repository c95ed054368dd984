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
    twice: Callable[..., Any] | None = None,
    otherwise: str = "take backend='reference' for it",
) -> Callable[..., Any]:
    """Register `run` as the operator `cai_kernels::name` and return that.

    Args:
        run: launches kernels on real tensors; its annotations are the operator's schema. It returns new tensors,
            never an argument.
        fake: takes the same arguments; returns empty tensors with the results' shapes, dtypes and strides. None for
            an operator that only writes into its arguments.
        name: the operator's name; None: that of `run`.
        mutates: names of the arguments `run` writes into.
        save: `(ctx, inputs, output)`, or `(ctx, inputs, keyword_only_inputs, output)` if `run` has keyword-only
            arguments; keeps what backward needs.
        backward: `(ctx, *gradients)`, returns a gradient or None for every positional argument. Calls operators, not
            kernels.
        twice: as `backward`, of operators that can be differentiated; runs under `create_graph=True`. Without, what
            `backward` returns raises when it is differentiated.
        otherwise: the advice of that error. An operator that the reference calls too says what is plain.
    """
    name = name or run.__name__.lstrip("_")
    _LIBRARY.define(name + torch.library.infer_schema(run, mutates_args=mutates))
    _LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cai_kernels::{name}", fake or (lambda *_, **__: None), lib=_LIBRARY)
    if backward is not None:
        differentiate = _differentiable(name, backward, twice, otherwise)
        torch.library.register_autograd(
            f"cai_kernels::{name}", differentiate, setup_context=save, lib=_LIBRARY
        )
    return getattr(torch.ops.cai_kernels, name).default


def constant_in_graphs(function: Callable[..., Any]) -> Callable[..., Any]:
    """Let torch's compiler call a function as it traces and keep the result, as `assume_constant_result` does.

    That one imports the compiler with whoever uses it, for two seconds of every command's start.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def _differentiable(
    name: str, backward: Callable[..., Any], twice: Callable[..., Any] | None, otherwise: str
) -> Callable[..., Any]:
    """`backward`, whose results raise when they are differentiated, or `twice`, whose results need not."""
    error = (
        f"the gradient of cai_kernels::{name} cannot be differentiated again: {otherwise}, or swap the model without "
        "its kind"
    )

    def differentiate(ctx, *gradients):
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        if twice is not None:
            return twice(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        tensors = [r.detach().requires_grad_() for r in results if isinstance(r, torch.Tensor)]
        raising = torch._C._functions.DelayedError(error.encode(), len(tensors))(*tensors) if tensors else ()  # type: ignore[attr-defined]
        raising_tensors = iter(raising if isinstance(raising, (tuple, list)) else (raising,))
        return tuple(next(raising_tensors) if isinstance(r, torch.Tensor) else r for r in results)

    return differentiate


def gradients_of(
    function: Callable[..., torch.Tensor],
    inputs: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
    dy: torch.Tensor,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of `function(*inputs)`, a plain form, that can be differentiated again; None where not needed."""
    with torch.enable_grad():
        # views, so that the gradient of one input has no part that goes through another
        inputs = [t if t is None else t.view_as(t) for t in inputs]
        needed_inputs = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
        gradients = iter(torch.autograd.grad(function(*inputs), needed_inputs, dy, create_graph=True))
    return tuple(
        next(gradients) if need and t is not None else None for t, need in zip(inputs, needed, strict=True)
    )
