"""Optimizers that may step parts of parameters: those whose rule treats every element by itself, which is tried."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError

_NO_RULE = ("params", "param_names", "initial_lr")
_STEPS = 8
_CLOSE = 1e-4


def check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise `PlanError` for an optimizer that steps a part of a parameter otherwise than the whole.

    It is tried: one of its kind steps two small matrices, as different in scale as parameters are, and for each part of
    them one more steps that part alone, as on a rank that has nothing else. What cannot be built again from its own
    defaults and attributes, or cannot step the matrices, says itself by an attribute that it is: `optimizer.elementwise
    = True`.
    """
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise PlanError(
            "this optimizer runs forward and backward itself, several times a step",
            got=type(optimizer).__name__,
            fix="use one whose step() takes no closure",
        )
    if getattr(optimizer, "elementwise", False):
        return
    for options in _kinds(optimizer):
        _try(optimizer, options)


def _kinds(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The options of each group that may change its rule: all but those that are numbers alone."""
    kinds: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        options = {name: value for name, value in group.items() if name not in _NO_RULE}
        rule = {name: value for name, value in options.items() if type(value) in (bool, str, type(None))}
        zeros = sorted(name for name, value in options.items() if type(value) in (int, float) and value == 0)
        kinds.setdefault(repr((sorted(rule.items()), zeros)), options)
    return list(kinds.values()) or [dict(optimizer.defaults)]


def _try(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> None:
    numbers = torch.Generator().manual_seed(0)
    shapes, scales = ((4, 6), (3, 5)), (1.0, 30.0)
    sizes = list(zip(shapes, scales, strict=True))

    def drawn() -> list[torch.Tensor]:
        return [scale * torch.randn(shape, generator=numbers, dtype=torch.float64) for shape, scale in sizes]

    starts, grads = drawn(), [drawn() for _ in range(_STEPS)]
    together = _stepped(optimizer, options, starts, grads)
    if together is None:
        raise PlanError(
            "this optimizer cannot be tried, so nobody knows whether it may step parts of parameters",
            got=type(optimizer).__name__,
            expected="one that can be built again from its defaults and attributes, and steps a small matrix",
            fix="if it treats every element by itself (no norm, no sum, no number over all of a parameter or over all "
            "parameters), say so: optimizer.elementwise = True",
        )
    for index, border in enumerate((7, 4)):
        for part in (slice(0, border), slice(border, None)):
            start, expected = starts[index].flatten()[part], together[index].flatten()[part]
            part_grads = [[step[index].flatten()[part]] for step in grads]
            alone = _stepped(optimizer, options, [start], part_grads)
            moved = (expected - start).abs().max()
            if alone is None or not torch.allclose(alone[0], expected, rtol=0, atol=float(moved * _CLOSE)):
                raise PlanError(
                    "this optimizer does not treat elements independently, so it cannot step parts of parameters",
                    got=type(optimizer).__name__,
                    expected="an elementwise one (SGD, Adam, AdamW, RMSprop ...)",
                    cause="a part of a parameter that it steps alone moves otherwise than in the whole: it takes a "
                    "norm, a sum or a number over all of a parameter, or over all parameters",
                    fix="cai_zero.optimizers has LAMB, LARS, Adafactor, CAME and Muon for divided parameters",
                )


def _stepped(
    optimizer: torch.optim.Optimizer,
    options: Mapping[str, Any],
    values: Sequence[torch.Tensor],
    grads: Sequence[Sequence[torch.Tensor]],
) -> list[torch.Tensor] | None:
    """The values after some steps of an optimizer of the same kind; None where that cannot be."""
    arguments = _arguments(optimizer, options)
    if arguments is None:
        return None
    params = [nn.Parameter(value.clone()) for value in values]
    try:
        with torch.enable_grad():
            tried = type(optimizer)(params, **arguments)
            for group in tried.param_groups:
                group.update(
                    {name: copy.deepcopy(options[name]) for name in options if name not in arguments}
                )
            for step_grads in grads:
                for param, grad in zip(params, step_grads, strict=True):
                    param.grad = grad.clone()
                tried.step()
    except Exception:
        return None
    return [param.detach() for param in params]


def _arguments(optimizer: torch.optim.Optimizer, options: Mapping[str, Any]) -> dict[str, Any] | None:
    """What its class is built with, of its groups' options and its attributes; None where something is in neither."""
    arguments: dict[str, Any] = {}
    takes = list(inspect.signature(type(optimizer).__init__).parameters.values())[2:]  # after self, params
    for argument in takes:
        if argument.kind in (argument.VAR_KEYWORD, argument.VAR_POSITIONAL):
            continue
        if argument.name in options:
            arguments[argument.name] = copy.deepcopy(options[argument.name])
        elif argument.name in optimizer.defaults:
            arguments[argument.name] = copy.deepcopy(optimizer.defaults[argument.name])
        elif hasattr(optimizer, argument.name):
            arguments[argument.name] = copy.deepcopy(getattr(optimizer, argument.name))
        else:
            return None
    return arguments | {key: False for key in ("capturable", "fused") if arguments.get(key)}
