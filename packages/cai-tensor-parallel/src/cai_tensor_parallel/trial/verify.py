"""Verify a plan: a small model of the same kind, cut over two virtual ranks, against the same model whole."""

from __future__ import annotations

import contextlib
import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import all_gather_object
from cai_mesh.errors import PlanError
from cai_mesh.layout import Layout, layout_of
from cai_mesh.trial import HEADS, SmallModel, Trial, arguments_of, shrunk, tensors_of
from cai_tensor_parallel.cut.between import owners, refusal, watch
from cai_tensor_parallel.cut.transform import Cut
from cai_tensor_parallel.modes.cutter import Cutter
from cai_tensor_parallel.plans.plan import Plan
from cai_tensor_parallel.trial.virtual_ranks import VirtualRanks, on_virtual_ranks

RANKS = 2
"""Number of ranks along every axis of a trial."""
TOLERANCE = 1e-4
"""Largest difference, relative to the largest value of a tensor: models compute parts of themselves in float32."""
SMALLEST = 1e-3
"""Gradients below this part of the model's largest are compared with that: what cancels leaves rounding."""
SHARED = "replicated_with_grad_allreduce"


PlanSearch = Callable[[nn.Module, int], Plan]
"""Finds the plan of a model over a number of ranks."""
_Items = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class _Request:
    """A trial and a plan to verify; equal requests are verified once.

    Args:
        plan: the items of a plan's three fields, or what finds the plan of the model that the trial builds.
    """

    trial: Trial | SmallModel
    plan: tuple[_Items, ...] | PlanSearch
    transform: Cut
    ranks: int

    def plan_of(self, model: nn.Module) -> Plan:
        """The plan by which a model of the trial is cut."""
        return self.plan(model, self.ranks) if callable(self.plan) else Plan(*map(dict, self.plan))


@dataclass
class _Result:
    """Results of one rank: what the model returned, the layout and gradient of each parameter, what `watch` found."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    gradients: dict[str, tuple[Layout, torch.Tensor | None]] = field(default_factory=dict)
    between: set[str] = field(default_factory=set)


UNEVEN = 9
"""Heads of a small model for heads that do not divide; also in groups of three."""


def trial_of(model: nn.Module, *, labelled: bool, uneven: bool = False) -> SmallModel | None:
    """The small model of a model of transformers, with its own loss where labels give one; None for other models.

    A decoder that can read an encoder's hidden states gets some: its cross-attention is tried, too. `uneven`: its
    heads do not divide over two ranks. Raises `PlanError` when none can be built.
    """
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        return None
    parameters = inspect.signature(type(model).forward).parameters
    reads = "encoder_hidden_states" in parameters and not model.config.is_encoder_decoder
    for with_labels in (True, False) if labelled and "labels" in parameters else (False,):
        for crossed in (True, False) if reads else (False,):
            with contextlib.suppress(PlanError):
                return shrunk(model, labelled=with_labels, crossed=crossed, heads=UNEVEN if uneven else HEADS)
    return shrunk(model, labelled=False)


def verified(
    trial: Trial | SmallModel, plan: Plan | PlanSearch, transform: Cut, ranks: int = RANKS
) -> dict[str, str]:
    """Roles to add to a plan, for parameters between its cuts: with them the cut model computes what it did whole.

    The trial is run whole, and cut over virtual ranks: what it returns, its loss and all gradients are compared.
    Raises `PlanError` when the cut model computes something else, or does not run.

    Args:
        plan: one for the trial too, or what finds the trial's own: the model itself may be a stage, without embeddings
            or head.
    """
    request = _Request(trial, plan if not isinstance(plan, Plan) else _items(plan), transform, ranks)
    changes = getattr(trial, "changes", ())
    if not changes:
        return _verified(request)
    try:
        return _verified.__wrapped__(request)  # not kept: it refers to the instance
    except PlanError as error:
        names = ", ".join(map(str, changes[:4]))
        cause = f"this instance has {names}, which its class and config do not make; {error.cause}"
        raise PlanError(
            error.what, got=error.got, expected=error.expected, cause=cause, fix=error.fix
        ) from error


def _items(plan: Plan) -> tuple[_Items, ...]:
    return tuple(tuple(mapping.items()) for mapping in (plan.roles, plan.divided, plan.arguments))


def on_first_rank(group: dist.ProcessGroup, work: Callable[[], dict[str, str]]) -> dict[str, str]:
    """Return or raise on all ranks of a group what `work` does on the first: one trial for all, not one each.

    Ranks that are simulated try for themselves.
    """
    if dist.get_backend(group) == "fake":
        return work()
    result, failure = dict[str, str](), None
    if group.rank() == 0:
        try:
            result = work()
        except PlanError as error:
            failure = error
    result, failure = all_gather_object((result, failure), group)[0]
    if failure is not None:
        raise failure
    return result


@lru_cache(maxsize=64)
def _verified(request: _Request) -> dict[str, str]:
    outputs, model = _run_whole(request)
    plan, added = request.plan_of(model), dict[str, str]()
    results = _on_ranks(request, plan, outputs)
    names = set().union(*(result.between for result in results))
    if names:
        added = {re.sub(r"\.\d+(?=\.|$)", ".*", name): SHARED for name in sorted(names)}
        results = _on_ranks(request, replace(plan, roles={**plan.roles, **added}), outputs)
    for result in results:
        _compare(model, outputs, result)
    return added


def _run_whole(request: _Request) -> tuple[dict[str, torch.Tensor], nn.Module]:
    try:
        with torch.device("cpu"), torch.enable_grad():
            model = request.trial.build().double().eval()
            return _run(model, _inputs(request), request), model
    except Exception as error:
        raise PlanError(
            "a small model of this kind has no gradients to compare with",
            got=f"{type(error).__name__}: {error}",
            cause="it does not run in float64 on the CPU in evaluation mode, forward and backward",
            fix="pass trial=Trial(...)",
        ) from error


def _on_ranks(request: _Request, plan: Plan, outputs: dict[str, torch.Tensor]) -> list[_Result]:
    axes = dict.fromkeys(request.transform.axes, request.ranks)
    with torch.device("cpu"), torch.enable_grad():  # not in the threads, which share a random generator
        count = range(math.prod(axes.values()))
        models = [request.trial.build().double().eval() for _ in count]
        inputs = [_inputs(request) for _ in count]

    def run(ranks: VirtualRanks) -> _Result:
        model, result = models[ranks.rank], _Result()
        with torch.device("cpu"), torch.enable_grad():
            request.transform(
                model, plan, ranks, Cutter(tuple((n, request.ranks, ranks.here[n]) for n in axes))
            )
            watch(model, _collect(model, result.between))
            result.outputs = _run(model, inputs[ranks.rank], request, outputs, ranks)
            result.gradients = {n: (layout_of(p), p.grad) for n, p in model.named_parameters()}
        return result

    try:
        return on_virtual_ranks(axes, run)
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
        names = owners(model, leaves)
        if not names:
            raise refusal(model, name, leaves)
        between.update(names)

    return collect


def _run(
    model: nn.Module,
    inputs: dict[str, Any],
    request: _Request,
    whole_outputs: dict[str, torch.Tensor] | None = None,
    ranks: VirtualRanks | None = None,
) -> dict[str, torch.Tensor]:
    """Run forward and backward; return the loss and the model's outputs, cut logits of the shape in `whole_outputs`."""
    trial, transform = request.trial, request.transform
    output = model(**arguments_of(model, inputs))
    tensors = tensors_of(output)
    for name, tensor in tensors.items():
        shape = tensor.shape if whole_outputs is None else whole_outputs.get(name, tensor).shape
        if ranks is not None and transform.sharded and tensor.dim() and tensor.shape != shape:
            tensors[name] = transform.whole(tensor, shape, ranks)
    unlabelled = isinstance(trial, SmallModel) and not trial.labelled
    loss = trial.loss(tensors if unlabelled else output)
    loss.backward()
    return {name: tensor.detach() for name, tensor in tensors.items()} | {"loss": loss.detach()}


def _inputs(request: _Request) -> dict[str, Any]:
    """The trial's inputs; where samples are cut, as many times as many samples, the copies moved on by some tokens."""
    inputs, copies = dict(request.trial.inputs()), request.transform.copies
    samples = next((t.shape[0] for t in inputs.values() if isinstance(t, torch.Tensor) and t.dim()), 0)

    def more(value: Any) -> Any:
        if copies == 1 or not isinstance(value, torch.Tensor) or not value.dim() or value.shape[0] != samples:
            return value
        mask = not value.is_floating_point() and bool((value < 2).all())
        return torch.cat([value if mask else value.roll(shift, -1) for shift in range(copies)])

    return {name: more(value) for name, value in inputs.items()}


def _compare(model: nn.Module, outputs: dict[str, torch.Tensor], result: _Result) -> None:
    name = type(model).__name__
    for key, value in outputs.items():
        _check(name, key, result.outputs.get(key), value, 0.0)
    gradients = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    largest = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    for key, value in gradients.items():
        layout, gradient = result.gradients[key]
        gradient = torch.zeros(layout.local_shape, dtype=value.dtype) if gradient is None else gradient
        for index, box in layout.slices():
            _check(name, f"gradient of {key}", gradient[index], value[box.slices()], SMALLEST * largest)


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
