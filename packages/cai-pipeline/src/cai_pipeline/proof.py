"""The trial of a split: a small instance, cut into stages that run one behind the other, against itself whole."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, canonical_name
from cai_pipeline.anatomy import Anatomy, examine
from cai_pipeline.balance import balance_layers
from cai_pipeline.miniature import Miniature
from cai_pipeline.stage import run_stage
from cai_pipeline.surgery import cut, tied_parameters

TOLERANCE = 1e-10
"""Largest difference, relative to the largest value of the tensor, that float64 rounding may leave."""


@lru_cache(maxsize=64)
def prove(twin: Miniature) -> Anatomy:
    """Split a small instance into up to three stages and compare with the whole one: logits, loss, gradients.

    Tried once per class and config. The first, a middle and the last stage are every kind of stage there is.

    Returns:
        where the parts of the model lie, which is the same for the large one.

    Raises:
        PlanError: the split model computes something else, or its code does not run when split.
    """
    with torch.device("cpu"), torch.enable_grad():
        return _prove(twin)


def _prove(twin: Miniature) -> Anatomy:
    whole = twin.build()
    name = type(whole).__name__
    try:
        anatomy = examine(whole, twin)
        layers = len(whole.get_submodule(anatomy.layers))  # type: ignore[arg-type]
        owned = balance_layers([1.0] * layers, min(3, layers))
        parts = [_part(whole, anatomy, owned, index) for index in range(len(owned))]
        labels = twin.inputs()["input_ids"]
        expected = whole(**twin.inputs(), labels=labels, use_cache=False)
        expected.loss.backward()
        output = chain(parts, {**twin.inputs(), "labels": labels})
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"{name} does not run when split", got=f"{type(error).__name__}: {error}") from error
    _compare(name, "logits", output.logits, expected.logits)
    _compare(name, "loss", output.loss, expected.loss)
    found = gradients(parts)
    for parameter_name, parameter in whole.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        _compare(name, f"gradient of {parameter_name}", found.get(parameter_name), gradient)
    return anatomy


def _part(whole: nn.Module, anatomy: Anatomy, owned: Sequence[range], index: int) -> nn.Module:
    part = copy.deepcopy(whole)
    tied = tied_parameters(part, anatomy, owned)
    cut(part, anatomy, owned, index, tied)
    for name, parameter in tied.items():
        attach(parameter, name=name)
    return part


def chain(parts: Sequence[nn.Module], inputs: Mapping[str, Any]) -> Any:
    """Run stages of one model one behind the other in this process, then its loss backward through all of them.

    Args:
        parts: all stages, in order.
        inputs: keyword arguments of the whole model, with `labels`.

    Returns:
        the last stage's output.
    """
    received: torch.Tensor | None = None
    boundaries: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in parts[:-1]:
        handed_over = run_stage(part, received, inputs)
        received = handed_over.detach().requires_grad_()
        boundaries.append((handed_over, received))
    output = run_stage(parts[-1], received, inputs)
    output.loss.backward()
    for handed_over, received in reversed(boundaries):
        handed_over.backward(received.grad)
    return output


def gradients(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of all stages by canonical name; those of a tied parameter's holders are added."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            key = canonical_name(name, parameter)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[key] = found[key] + gradient if key in found else gradient
    return found


def _compare(model: str, what: str, got: torch.Tensor | None, expected: torch.Tensor) -> None:
    if got is None:
        difference = float("inf")
    else:
        scale = float(expected.detach().abs().max())
        difference = float((got.detach() - expected.detach()).abs().max()) / (scale or 1.0)
    if not difference <= TOLERANCE:
        raise PlanError(
            f"{model} computes something else when it is split",
            got=f"{what} off by {difference:.1e} relative to its largest value",
            expected=f"at most {TOLERANCE:g}",
            cause="its layers use something that is computed outside of them and depends on the hidden states",
        )
