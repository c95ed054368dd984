"""Verify a split: a small model, split into stages that run one after the other, against the same model unsplit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import attach, canonical_name
from cai_mesh.trial import SmallModel, Trial, arguments_of, tensors_of
from cai_pipeline.plans.placement import Held, place
from cai_pipeline.stages.balance import balance_layers
from cai_pipeline.stages.boundary import Tensors, gradients_to_send, tensors_in
from cai_pipeline.stages.call import Call
from cai_pipeline.stages.partition import partition, tied_parameters
from cai_pipeline.stages.random_numbers import draws_by_place
from cai_pipeline.stages.stage import Stages, run_stage
from cai_pipeline.stages.structure import ModelStructure, find_structure

TOLERANCE = 1e-10
"""Largest difference allowed for float64 rounding, relative to the largest value of the tensor."""


@dataclass(frozen=True)
class Tried:
    """A trial, divided as the model is.

    Args:
        trial: the small model.
        stage_layers: the layers of each stage; None: up to three stages.
        stage_ranks: the rank of each stage; None: each has its own.
    """

    trial: Trial | SmallModel
    stage_layers: tuple[range, ...] | None = None
    stage_ranks: Held | None = None

    @cached_property
    def known(self) -> dict[str, int]:
        """Number of dims of the trial's inputs, by name."""
        return {name: getattr(value, "ndim", 0) for name, value in self.trial.inputs().items()}


@dataclass(frozen=True)
class CallCheck:
    """A stage's `check`: tries every new way to call the model on a small one, see `verify_call`."""

    tried: Tried

    def __call__(self, model: nn.Module, inputs: Mapping[str, Any]) -> frozenset[str]:
        return verify_call(self.tried, Call.of(model, inputs, self.tried.trial, self.tried.known))


def verify_split(
    trial: Trial | SmallModel, stage_layers: Sequence[range] | None = None, stage_ranks: Held | None = None
) -> ModelStructure:
    """Split a small model into stages and compare with it unsplit: output, loss and all gradients.

    Done once per trial (of transformers: per class and config) and division.

    Args:
        stage_layers: the layers of each stage; None, or a trial with another number of layers: up to three stages.
        stage_ranks: the rank of each stage; None: each has its own.

    Returns:
        where the parts of the model lie; the large model has the same structure.

    Raises:
        PlanError: the split model computes something else, or its code does not run when split.
    """
    structure = structure_of(trial)
    verify_call(Tried(trial, None if stage_layers is None else tuple(stage_layers), stage_ranks), Call())
    return structure


@lru_cache(maxsize=64)
def structure_of(trial: Trial | SmallModel) -> ModelStructure:
    """The places of the parts of a trial's model. Raises PlanError when it cannot be split between its layers."""
    with torch.device("cpu"), torch.enable_grad():
        model = trial.build().double().eval()
        with _explained(type(model).__name__):
            structure = find_structure(model, trial)
            if _ends_pass(model, structure, trial):
                return structure
            return replace(structure, shaping=structure.shaping | set(structure.lists[-1].after))


def _ends_pass(model: nn.Module, structure: ModelStructure, trial: Trial | SmallModel) -> bool:
    """Whether a first stage runs with what follows the layers handing on its input, which is cheaper than zeros.

    It does not where the model's code needs the shape of a head's output, to add a bias or to fold it to an image.
    """
    layers = len(structure.layers(model))
    if layers < 2:
        return True
    try:
        part = _part(model, structure, balance_layers([1.0] * layers, 2), place(2), 0)
        with torch.no_grad():
            run_stage(part, None, trial.inputs())
    except Exception:
        return False
    return True


@lru_cache(maxsize=256)
def verify_call(tried: Tried, call: Call) -> frozenset[str]:
    """As `verify_split`, for one way to call the model.

    Returns:
        the entries of what the model returns that the last stage does not have as the whole model has them.
    """
    trial, structure = tried.trial, structure_of(tried.trial)
    with torch.device("cpu"), torch.enable_grad():
        unsplit_model = trial.build().double().train(call.training)
        stage_layers, stage_ranks = _division(tried, len(structure.layers(unsplit_model)))
        owners = [stage for stage, layers in enumerate(stage_layers) for _ in layers]
        name, inputs = f"{type(unsplit_model).__name__} in {call}", call.inputs(trial)
        with _explained(name):
            parts = [
                _part(unsplit_model, structure, stage_layers, stage_ranks, rank)
                for rank in range(max(stage_ranks) + 1)
            ]
            _check_all_run(unsplit_model, structure, owners, inputs, call)
            with draws_by_place(unsplit_model, structure, None, owners):
                expected = unsplit_model(**arguments_of(unsplit_model, inputs))
            loss = _loss(trial, call)
            loss(expected).backward()
            output = chain([parts[rank] for rank in stage_ranks], inputs, loss, structure, owners)
    _compare(name, "loss", loss(output), loss(expected))
    _compare(name, "output", _main(output), _main(expected))
    split_gradients = gradients(parts)
    for parameter_name, parameter in unsplit_model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        _compare(name, f"gradient of {parameter_name}", split_gradients.get(parameter_name), gradient)
    return _differing(output, expected)


def _division(tried: Tried, layers: int) -> tuple[list[range], Held]:
    """The layers of each stage, and the rank of each."""
    stage_layers = list(tried.stage_layers or ())
    if not stage_layers or stage_layers[-1].stop != layers:
        count = 3 if tried.stage_ranks is None else len(tried.stage_ranks)
        stage_layers = balance_layers([1.0] * layers, min(count, layers))
    ranks_fit = tried.stage_ranks is not None and len(tried.stage_ranks) == len(stage_layers)
    return stage_layers, tried.stage_ranks if ranks_fit and tried.stage_ranks else place(len(stage_layers))


@contextmanager
def _explained(name: str) -> Iterator[None]:
    try:
        yield
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(f"{name} does not run when split", got=f"{type(error).__name__}: {error}") from error


def _check_all_run(
    unsplit_model: nn.Module,
    structure: ModelStructure,
    owners: Sequence[int],
    inputs: Mapping[str, Any],
    call: Call,
) -> None:
    """Raise PlanError for a model that leaves out layers when the numbers it draws are low."""
    if not call.training:
        return
    tried = copy.deepcopy(unsplit_model)
    with torch.no_grad(), draws_by_place(tried, structure, None, owners, lowest=True) as run:
        tried(**arguments_of(unsplit_model, inputs))
    if run != list(range(len(owners))):
        raise PlanError(
            f"{type(unsplit_model).__name__} leaves out layers at random in training mode",
            got=f"layers {run} of {len(owners)}",
            cause="an option such as layerdrop: stages would have to leave out the same layers",
            fix="turn it off when training in a pipeline",
        )


def _loss(trial: Trial | SmallModel, call: Call) -> Callable[[Any], torch.Tensor]:
    if "labels" not in call.without:
        return trial.loss

    def of_logits(output: Any) -> torch.Tensor:
        flat = output.logits.flatten()
        return (flat * torch.linspace(-1.0, 1.0, flat.numel(), dtype=flat.dtype)).sum()

    return of_logits


def _differing(output: Any, expected: Any) -> frozenset[str]:
    """First parts of the names of tensors that are not the same."""
    got, wrong = tensors_of(output, ""), set()
    for key, value in tensors_of(expected, "").items():
        if key not in got or got[key].shape != value.shape or not _close(got[key], value):
            wrong.add(key.split(".")[1] if "." in key else key)
    return frozenset(wrong)


def _close(got: torch.Tensor, expected: torch.Tensor) -> bool:
    return bool((got - expected).abs().max() <= TOLERANCE * expected.abs().max()) if got.numel() else True


def _part(
    unsplit_model: nn.Module,
    structure: ModelStructure,
    stage_layers: Sequence[range],
    stage_ranks: Held,
    rank: int,
) -> nn.Module:
    part = copy.deepcopy(unsplit_model)
    tied = tied_parameters(part, structure, stage_layers)
    partition(part, structure, stage_layers, stage_ranks, rank, tied)
    for name, tie in tied.items():
        attach(tie.parameter, name=name)
    return part


def chain(
    parts: Sequence[nn.Module],
    inputs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor],
    structure: ModelStructure | None = None,
    owners: Sequence[int] = (),
) -> Any:
    """Run all stages of a model one after the other in this process, then backward through all of them.

    Args:
        parts: the model of each stage, in order; one that holds several stages is there for each.
        inputs: keyword arguments of the whole model.
        loss: the loss as a function of the last stage's output.
        structure: the model's structure, for random numbers as `draws_by_place` has them; None: as they come.
        owners: stage of each layer, then.

    Returns:
        the last stage's output.
    """
    received: Tensors = ()
    boundaries: list[tuple[Tensors, Tensors]] = []

    def _draws(part: nn.Module, index: int) -> AbstractContextManager[Any]:
        return draws_by_place(part, structure, index, owners) if structure else nullcontext()

    def run(index: int) -> Any:
        part = parts[index]
        stage = Stages.of(part).own[index]
        with stage.shown(part), _draws(part, index):
            return run_stage(part, received or None, inputs, index=index)

    for index in range(len(parts) - 1):
        sent = tensors_in(run(index))
        received = tuple(tensor.detach().requires_grad_() for tensor in sent)
        boundaries.append((sent, received))
    output = run(len(parts) - 1)
    loss(output).backward()
    for sent, received in reversed(boundaries):
        pairs = list(zip(sent, gradients_to_send(received), strict=True))
        learned = [pair for pair in pairs if pair[0].requires_grad]
        torch.autograd.backward([tensor for tensor, _ in learned], [gradient for _, gradient in learned])
    return output


def _main(output: Any) -> torch.Tensor | None:
    """The tensor a model returns, or the logits of a transformers output; None where there is neither."""
    return output if isinstance(output, torch.Tensor) else getattr(output, "logits", None)


def gradients(parts: Iterable[nn.Module]) -> dict[str, torch.Tensor]:
    """The gradients of all ranks' models by canonical name; a tied parameter's are summed over those."""
    gradient_sums: dict[str, torch.Tensor] = {}
    for part in parts:
        for name, parameter in part.named_parameters():
            key = canonical_name(name, parameter)
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            gradient_sums[key] = gradient_sums[key] + gradient if key in gradient_sums else gradient
    return gradient_sums


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
