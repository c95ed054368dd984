"""Verify a plan: a small model of the same kind, cut over two virtual ranks, against the same model whole."""

from __future__ import annotations

import contextlib
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, layout_of
from cai_mesh.trial import SmallModel, Trial, arguments_of, shrunk, tensors_of
from cai_tensor_parallel.between import owners, refusal, watch
from cai_tensor_parallel.plan import Plan, plan_for
from cai_tensor_parallel.shard import Cutter
from cai_tensor_parallel.virtual import on_virtual_ranks
from cai_tensor_parallel.vocab import gather_logits

RANKS = 2
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value of a tensor: models compute parts of themselves in float32."""
SMALLEST = 1e-3
"""Gradients below this part of the model's largest are compared with that: what cancels leaves rounding."""
SHARED = "replicated_with_grad_allreduce"

Cut = Callable[[nn.Module, Plan, dist.ProcessGroup, Cutter], None]
"""(model, plan, group, cutter): what `parallelize` does to a model. Equal ones do the same."""


@dataclass(frozen=True)
class _Request:
    """What is verified; equal requests are verified once. Without roles the plan is the one the trial carries."""

    trial: Trial | SmallModel
    roles: tuple[tuple[str, str], ...]
    divided: tuple[tuple[str, tuple[str, ...]], ...]
    cut: Cut

    def plan(self, whole: nn.Module) -> Plan:
        return Plan(dict(self.roles), dict(self.divided)) if self.roles else plan_for(whole)


@dataclass
class _Result:
    """Of one rank: what the model returned, the layout and gradient of each parameter, what `watch` found."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, tuple[Layout, torch.Tensor | None]] = field(default_factory=dict)
    between: set[str] = field(default_factory=set)


def trial_of(model: nn.Module, *, labelled: bool) -> SmallModel | None:
    """The small model of a model of transformers, with its own loss where labels give one; None for other models.

    Raises `PlanError` when none can be built.
    """
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        return None
    if labelled and "labels" in inspect.signature(type(model).forward).parameters:
        with contextlib.suppress(PlanError):
            return shrunk(model)
    return shrunk(model, labelled=False)


def verified(trial: Trial | SmallModel, plan: Plan | None, cut: Cut) -> dict[str, str]:
    """Roles to add to a plan, for parameters between its cuts: with them the cut model computes what it did whole.

    The trial is run whole, and cut over two virtual ranks: what it returns, its loss and all gradients are compared.
    Without a plan it is cut by the one it carries: the model itself may be a stage, without embeddings or head.
    Raises `PlanError` when the cut model computes something else, or does not run.
    """
    roles, divided = ((), ()) if plan is None else (tuple(plan.roles.items()), tuple(plan.divided.items()))
    return _verified(_Request(trial, roles, divided, cut))


@lru_cache(maxsize=64)
def _verified(request: _Request) -> dict[str, str]:
    with torch.device("cpu"), torch.enable_grad():
        whole = request.trial.build().double().eval()
        outputs = _run(whole, request.trial)
    plan, added = request.plan(whole), dict[str, str]()
    results = _on_ranks(request, plan, outputs)
    found = set().union(*(result.between for result in results))
    if found:
        added = {re.sub(r"\.\d+(?=\.|$)", ".*", name): SHARED for name in sorted(found)}
        results = _on_ranks(request, replace(plan, roles={**plan.roles, **added}), outputs)
    for result in results:
        _compare(whole, outputs, result)
    return added


def _on_ranks(request: _Request, plan: Plan, outputs: dict[str, torch.Tensor]) -> list[_Result]:
    trial = request.trial
    with torch.device("cpu"):  # not in the threads, which share a random generator
        models = [trial.build().double().eval() for _ in range(RANKS)]

    def run(group: dist.ProcessGroup) -> _Result:
        model, result = models[group.rank()], _Result()
        with torch.device("cpu"), torch.enable_grad():
            request.cut(model, plan, group, Cutter((("tp", RANKS, group.rank()),)))
            watch(model, _collect(model, result.between))
            result.outputs = _run(model, trial, outputs, group)
            result.gradients = {n: (layout_of(p), p.grad) for n, p in model.named_parameters()}
        return result

    try:
        return on_virtual_ranks(RANKS, run)
    except PlanError:
        raise
    except Exception as error:
        raise PlanError(
            "a small model of this kind does not run when it is cut",
            got=f"{type(error).__name__}: {error}",
            cause="something between its cuts needs all features, or a size does not divide",
            fix="pass a plan that gives it whole features: colwise_gather_output before, rowwise_split_input after",
        ) from error


def _collect(model: nn.Module, between: set[str]) -> Callable[[str, list[torch.Tensor]], None]:
    """Notes the modules whose parameters lie between cuts; refuses whatever is no parameter."""

    def collect(name: str, leaves: list[torch.Tensor]) -> None:
        found = owners(model, leaves)
        if not found:
            raise refusal(model, name, leaves)
        between.update(found)

    return collect


def _run(
    model: nn.Module,
    trial: Trial | SmallModel,
    whole: dict[str, torch.Tensor] | None = None,
    group: dist.ProcessGroup | None = None,
) -> dict[str, torch.Tensor]:
    """Forward and backward; the loss and what the model returned, cut logits put together as those in `whole`."""
    output = model(**arguments_of(model, trial.inputs()))
    found = tensors_of(output)
    for name, tensor in found.items():
        width = tensor.shape[-1:] if whole is None or name not in whole else whole[name].shape[-1:]
        if tensor.shape[-1:] != width:
            found[name] = gather_logits(tensor, width[0], group)
    unlabelled = isinstance(trial, SmallModel) and not trial.labelled
    loss = trial.loss(found if unlabelled else output)
    loss.backward()
    return {name: tensor.detach() for name, tensor in found.items()} | {"loss": loss.detach()}


def _compare(whole: nn.Module, outputs: dict[str, torch.Tensor], result: _Result) -> None:
    name = type(whole).__name__
    for key, value in outputs.items():
        _check(name, key, result.outputs.get(key), value, 0.0)
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in whole.named_parameters()}
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for key, value in gradients.items():
        layout, got = result.gradients[key]
        got = torch.zeros(layout.local_shape, dtype=value.dtype) if got is None else got
        for here, box in layout.slices():
            _check(name, f"gradient of {key}", got[here], value[box.slices()], SMALLEST * largest)


def _check(model: str, what: str, got: torch.Tensor | None, expected: torch.Tensor, floor: float) -> None:
    if not expected.numel():
        return
    if got is None or got.shape != expected.shape:
        difference = float("inf")
    else:
        scale = max(float(expected.abs().max()), floor)
        difference = float((got - expected).abs().max()) / (scale or 1.0)
    if not difference <= TOLERANCE:
        raise PlanError(
            f"{model} computes something else when it is cut by this plan",
            got=f"{what} off by {difference:.1e} relative to its largest value",
            expected=f"at most {TOLERANCE:g}",
            cause="what lies between its cuts mixes features, or uses whole ones on every rank",
            fix="pass a plan that gives it whole features: colwise_gather_output before, rowwise_split_input after",
        )
