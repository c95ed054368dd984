"""Proves on a small model that rows of a batched layer which are zero may stay where they are."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cai_mesh.errors import PlanError
from cai_mesh.trial import SmallModel, Trial, arguments_of
from cai_tensor_parallel.experts.batched import visited_rows
from cai_tensor_parallel.experts.finding import ExpertsRole, experts_of

TOLERANCE = 1e-6
"""Largest difference in float64, relative to the largest value: some layers compute parts of themselves in float32."""


def verify_left_out(model: nn.Module, trial: Trial | SmallModel, name: str, role: ExpertsRole) -> None:
    """Compare the gradients of a small model with those that it has where nothing comes back for rows of zeros.

    Raises `PlanError` where they differ: something else than a weight of zero made those rows, or such a weight learns.
    """
    layer = model.get_submodule(name)
    expected = _gradients(model, trial)

    def leave_out(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        (rows,) = args
        places = visited_rows(rows, experts_of(layer, role), experts_of(layer, role))
        visited = torch.zeros(len(rows), 1, dtype=rows.dtype).index_fill(0, places, 1.0)
        return (_Passing.apply(rows, visited),)

    hook = layer.register_forward_pre_hook(leave_out)
    without = _gradients(model, trial)
    hook.remove()
    for key, value in expected.items():
        difference = float((without[key] - value).abs().max() / value.abs().max().clamp(min=1e-30))
        if not difference <= TOLERANCE:
            raise PlanError(
                f"{name} learns from rows of zeros",
                got=f"the gradient of {key} without them off by {difference:.1e} relative to its largest value",
                expected="rows of experts that a token does not visit, multiplied by a weight that stays zero",
                cause="every expert computes for every token, so tokens cannot travel to a few of them",
                fix="leave its experts together, or pass a plan without it",
            )


def _gradients(model: nn.Module, trial: Trial | SmallModel) -> dict[str, Tensor]:
    loss = trial.loss(model(**arguments_of(model, trial.inputs())))
    named = {name: param for name, param in model.named_parameters() if param.requires_grad}
    gradients = torch.autograd.grad(loss, list(named.values()), materialize_grads=True, allow_unused=True)
    return dict(zip(named, gradients, strict=True))


class _Passing(torch.autograd.Function):
    """Rows as they are, whose gradients pass where they are visited."""

    @staticmethod
    def forward(ctx, rows, visited):
        ctx.visited = visited
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.visited, None
