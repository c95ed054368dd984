"""Proves on a small model that a layer's experts can be apart: what parts make of their tokens sums up to the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from cai_mesh.errors import PlanError
from cai_mesh.layout import layout_of
from cai_mesh.trial import SmallModel, Trial, arguments_of
from cai_tensor_parallel.experts.batched import batched_forward, visited_rows
from cai_tensor_parallel.experts.batched_trial import TOLERANCE, verify_left_out
from cai_tensor_parallel.experts.cutting import keep_own
from cai_tensor_parallel.experts.finding import ExpertsPlan, ExpertsRole, experts_of, find_experts
from cai_tensor_parallel.experts.layer import ExpertMaths, own_forward
from cai_tensor_parallel.experts.routes import parts_of, rows_of
from cai_tensor_parallel.modes.cutter import Cutter

PARTS = 2


@dataclass(frozen=True)
class _Call:
    """What a layer of experts was called with: tokens [T, D], ids [T, K], weights [T, K].

    Args:
        places: the rows of a batched layer that the tokens are, [T].
        rows: the number of its rows.
    """

    tokens: Tensor
    ids: Tensor
    weights: Tensor
    places: Tensor | None = None
    rows: int = 0

    @classmethod
    def of(cls, layer: nn.Module, role: ExpertsRole, *arguments: Tensor) -> _Call:
        """The call of a layer with these tensors, which may have more dimensions."""
        flat = [value.detach().flatten(0, -2) for value in arguments]
        if role.form == "chosen":
            return cls(*flat)
        (rows,), experts = flat, experts_of(layer, role)
        places = visited_rows(rows, experts, experts)
        ids = (places // (len(rows) // experts))[:, None]
        return cls(rows[places], ids, torch.ones_like(ids, dtype=rows.dtype), places, len(rows))

    def whole(self, layer: nn.Module) -> Tensor:
        """What the forward of a layer's class makes of it."""
        if self.places is None:
            return type(layer).forward(layer, self.tokens, self.ids, self.weights).view(self.tokens.shape)  # type: ignore[no-any-return]
        output = type(layer).forward(layer, self.among_all(self.tokens))
        return output.index_copy(0, self.places, output[self.places] * self.weights)

    def among_all(self, tokens: Tensor) -> Tensor:
        """Tokens where they are among all rows, and zeros elsewhere."""
        if self.places is None:
            return tokens
        return tokens.new_zeros(self.rows, tokens.shape[1]).index_copy(0, self.places, tokens)


def verify_experts(trial: Trial | SmallModel, plan: ExpertsPlan | None = None) -> None:
    """Run a small model, then each kind of its layers of experts, whole and in two parts.

    Raises `PlanError` where the parts do not sum up to the whole, outputs and gradients alike: of a layer whose tokens
    depend on each other, as by a capacity. Of a batched layer rows that are zero are left out; gradients of the whole
    model must be the same without theirs.
    """
    with torch.device("cpu"), torch.enable_grad():
        model = trial.build().double().eval()
        kinds = dict[type, tuple[str, ExpertsRole]]()
        for name, role in find_experts(model, plan).items():
            kinds.setdefault(type(model.get_submodule(name)), (name, role))
        calls = _calls(model, trial, dict(kinds.values()))
        for name, role in kinds.values():
            if name in calls:  # a part of a model that its small form has no input for
                _verify(name, model.get_submodule(name), role, calls[name])
                if role.form == "batched":
                    verify_left_out(model, trial, name, role)


def _calls(model: nn.Module, trial: Trial | SmallModel, roles: Mapping[str, ExpertsRole]) -> dict[str, _Call]:
    """The arguments with which layers are called in a forward of the model."""
    calls = dict[str, _Call]()

    def noting(name: str) -> Callable[..., None]:
        def note(layer: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
            calls[name] = _Call.of(layer, roles[name], *args, *kwargs.values())

        return note

    hooks = [
        model.get_submodule(name).register_forward_pre_hook(noting(name), with_kwargs=True) for name in roles
    ]
    model(**arguments_of(model, trial.inputs()))
    for hook in hooks:
        hook.remove()
    return calls


def _verify(name: str, layer: nn.Module, role: ExpertsRole, call: _Call) -> None:
    experts = experts_of(layer, role)
    expected = _results([layer], call, lambda leaves: leaves.whole(layer))
    maths: ExpertMaths = own_forward if role.form == "chosen" else partial(batched_forward, role)
    try:
        layers = [_part(layer, role, index) for index in range(PARTS)]
        in_parts = _results(layers, call, lambda leaves: _summed(layers, experts, leaves, maths))
    except Exception as error:
        raise PlanError(
            f"{name} does not run in two parts",
            got=f"{type(error).__name__}: {error}",
            expected="a forward of (tokens [T, D], ids [T, K], weights [T, K]) for any T and K",
            fix="leave its experts together, or pass a plan without it",
        ) from error
    for what, value in expected.items():
        difference = float((in_parts[what] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        if not difference <= TOLERANCE:
            raise PlanError(
                f"{name} computes something else in two parts",
                got=f"{what} off by {difference:.1e} relative to its largest value",
                expected=f"at most {TOLERANCE:g}",
                cause="its tokens depend on each other, as by a capacity",
                fix="leave its experts together, or pass a plan without it",
            )


def _part(layer: nn.Module, role: ExpertsRole, index: int) -> nn.Module:
    """A copy of a layer with one part of its experts."""
    part = copy.deepcopy(layer)
    keep_own(part, role, Cutter((("ep", PARTS, index),)))
    setattr(part, role.count, experts_of(layer, role) // PARTS)
    return part


def _summed(layers: list[nn.Module], experts: int, call: _Call, maths: ExpertMaths) -> Tensor:
    """The sum of what each part makes of the tokens that visit it."""
    total, rows = torch.zeros_like(call.tokens), rows_of(call.ids, parts_of(experts, PARTS))
    counts = rows.counts.tolist()
    for layer, tokens, own_ids in zip(layers, rows.tokens.split(counts), rows.ids.split(counts), strict=True):
        output = maths(layer, call.tokens[tokens], own_ids, call.weights[tokens], None)
        total = total.index_add(0, tokens, output)
    return call.among_all(total)


def _results(layers: list[nn.Module], call: _Call, compute: Callable[[_Call], Tensor]) -> dict[str, Tensor]:
    """The output, and the gradients of tokens, weights and parameters; those of parts put together."""
    call = replace(
        call, tokens=call.tokens.clone().requires_grad_(), weights=call.weights.clone().requires_grad_()
    )
    output = compute(call)
    direction = torch.randn(output.shape, generator=torch.Generator().manual_seed(0), dtype=output.dtype)
    params = [dict(layer.named_parameters()) for layer in layers]
    leaves = [call.tokens, call.weights, *(of[name] for name in params[0] for of in params)]
    gradients = list(torch.autograd.grad((output * direction).sum(), leaves, materialize_grads=True))
    values = {"output": output.detach(), "the tokens' gradient": gradients.pop(0)}
    values["the weights' gradient"] = gradients.pop(0)
    for name, param in params[0].items():
        pieces = [gradients.pop(0) for _ in layers]
        is_cut = bool(layout_of(param).sharded_axes) or len(layers) == 1
        values[f"the gradient of {name}"] = torch.cat(pieces) if is_cut else torch.stack(pieces).sum(0)
    return values
