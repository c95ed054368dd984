"""Verify a split: a small model, split into stages that run one after the other, against the same model unsplit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, canonical_name
from cai_pipeline.balance import balance_layers
from cai_pipeline.partition import partition, tied_parameters
from cai_pipeline.small_model import SmallModel
from cai_pipeline.stage import arguments_of, run_stage
from cai_pipeline.structure import ModelStructure, find_structure
from cai_pipeline.trial import Trial

TOLERANCE = 1e-10
"""Largest difference allowed for float64 rounding, relative to the largest value of the tensor."""


@lru_cache(maxsize=64)
def verify_split(trial: Trial | SmallModel) -> ModelStructure:
    """Split a small model into up to three stages and compare with it unsplit: output, loss and all gradients.

    Done once per trial (of transformers: per class and config). Three stages are enough: first, middle and last.

    Returns:
        where the parts of the model lie; the large model has the same structure.

    Raises:
        PlanError: the split model computes something else, or its code does not run when split.
    """
    with torch.device("cpu"), torch.enable_grad():
        return _verify_split(trial)


def _verify_split(trial: Trial | SmallModel) -> ModelStructure:
    whole = trial.build().double().eval()
    name = type(whole).__name__
    try:
        structure = find_structure(whole, trial)
        layers = len(whole.get_submodule(structure.layers))  # type: ignore[arg-type]
        stage_layers = balance_layers([1.0] * layers, min(3, layers))
        parts = [_part(whole, structure, stage_layers, index) for index in range(len(stage_layers))]
        expected = whole(**arguments_of(whole, trial.inputs()))
        trial.loss(expected).backward()
        output = chain(parts, trial.inputs(), trial.loss)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"{name} does not run when split", got=f"{type(error).__name__}: {error}") from error
    _compare(name, "loss", trial.loss(output), trial.loss(expected))
    _compare(name, "output", _main(output), _main(expected))
    found = gradients(parts)
    for parameter_name, parameter in whole.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        _compare(name, f"gradient of {parameter_name}", found.get(parameter_name), gradient)
    return structure


def _part(
    whole: nn.Module, structure: ModelStructure, stage_layers: Sequence[range], index: int
) -> nn.Module:
    part = copy.deepcopy(whole)
    tied = tied_parameters(part, structure, stage_layers)
    partition(part, structure, stage_layers, index, tied)
    for name, parameter in tied.items():
        attach(parameter, name=name)
    return part


def chain(parts: Sequence[nn.Module], inputs: Mapping[str, Any], loss: Callable[[Any], torch.Tensor]) -> Any:
    """Run all stages of a model one after the other in this process, then backward through all of them.

    Args:
        parts: all stages, in order.
        inputs: keyword arguments of the whole model.
        loss: of the last stage's output.

    Returns:
        the last stage's output.
    """
    received: torch.Tensor | None = None
    boundaries: list[tuple[torch.Tensor, torch.Tensor]] = []
    for part in parts[:-1]:
        sent = run_stage(part, received, inputs)
        received = sent.detach().requires_grad_()
        boundaries.append((sent, received))
    output = run_stage(parts[-1], received, inputs)
    loss(output).backward()
    for sent, received in reversed(boundaries):
        sent.backward(received.grad)
    return output


def _main(output: Any) -> torch.Tensor | None:
    """The tensor a model returns, or the logits of a transformers output; None where there is neither."""
    return output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)


def gradients(parts: Sequence[nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of all stages by canonical name; a tied parameter's are summed over its stages."""
    found: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            key = canonical_name(name, parameter)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            found[key] = found[key] + gradient if key in found else gradient
    return found


def _compare(model: str, what: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    if expected is None:
        return
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
            cause="its layers use something that is computed outside them from the hidden states",
        )
