"""The state of an optimizer by parameter name, so that it can be saved and loaded on any layout."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import local_gradient, plain
from cai_mesh.layout import SIGNATURE, BoxedTensor, canonical_name


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate the state it lacks, changing nothing: a step with zero gradients, rate and decay.

    A fresh one lacks all, one that has stepped that of parameters that never had a gradient.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in params if p.requires_grad and p not in optimizer.state]
    if not missing:
        return
    gradients = [(p, local_gradient(p)) for p in params]
    with plain(params):
        _step_with_zeros(optimizer, params, missing, gradients)


def _step_with_zeros(
    optimizer: torch.optim.Optimizer,
    params: list[torch.Tensor],
    missing: list[torch.Tensor],
    gradients: list[tuple[torch.Tensor, torch.Tensor | None]],
) -> None:
    kept_options = [
        {k: group[k] for k in ("lr", "weight_decay") if k in group} for group in optimizer.param_groups
    ]
    values = [p.detach().clone() for p in missing]
    for p in params:
        p.grad = None
    for p in missing:
        p.grad = torch.zeros_like(p)
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0  # decay that joins the gradient would enter the moments
    optimizer.step()
    for group, options in zip(optimizer.param_groups, kept_options, strict=True):
        group.update(options)
    with torch.no_grad(), plain(params):  # a step of shards has shown them again
        for p, grad in gradients:
            p.grad = grad
        for p, value in zip(missing, values, strict=True):
            p.copy_(value)
            step = optimizer.state[p].get("step")
            if isinstance(step, torch.Tensor):
                step.zero_()


def state_slots(optimizer: torch.optim.Optimizer, param: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors an optimizer keeps for a parameter, allocated if they were not yet; none if it has another's."""
    if (
        param.requires_grad and param not in optimizer.state
    ):  # looked up once a parameter: there may be thousands
        initialize_state(optimizer)
    state = optimizer.state.get(param, {})
    return {slot: value for slot, value in state.items() if isinstance(value, torch.Tensor)}


def saved_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The hyperparameters of every param group that JSON can hold."""
    plain = (bool, int, float, str, type(None))
    return [
        {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in group.items()
            if k != SIGNATURE and (isinstance(v, plain) or _numbers(v))
        }
        for group in optimizer.param_groups
    ]


def _numbers(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and all(isinstance(x, (int, float)) for x in value)


def restore_groups(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Take over saved hyperparameters, keeping the kind of sequence each had, and loaded state.

    An optimizer with `boxed_state` may have lent copies to the checkpoint; its `state_loaded` takes them back. Raises
    `PlanError` for another number of groups.
    """
    if len(groups) != len(optimizer.param_groups):
        raise PlanError(
            "the saved optimizer had another number of param groups",
            got=len(groups),
            expected=len(optimizer.param_groups),
            fix="add the groups that were added on the way (add_param_group) before loading",
        )
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            group[key] = tuple(value) if isinstance(group.get(key), tuple) else value
    loaded = getattr(getattr(optimizer, "inner", optimizer), "state_loaded", None)
    if loaded is not None:
        loaded()


def own_boxes(
    optimizer: torch.optim.Optimizer, param: torch.Tensor, name: str = ""
) -> dict[str, BoxedTensor] | None:
    """Return what an optimizer says of its state by `boxed_state(param, name)`; None if it is an ordinary one."""
    say = getattr(optimizer, "boxed_state", None)
    if say is None:
        return None
    with plain([param]):
        return say(param, name)


def optimizer_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, BoxedTensor | list]:
    """State (`NAME.SLOT`) and `param_groups` of an ordinary optimizer over a model's own parameters.

    For stage 3 and for unsharded loops. Tensors are views, so loading a checkpoint fills the optimizer in place.
    """
    state: dict[str, BoxedTensor | list] = {"param_groups": saved_groups(optimizer)}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        boxes = own_boxes(optimizer, param, canonical_name(name, param))
        if boxes is not None:
            state.update(boxes)
            continue
        with plain([param]):
            shape = param.shape  # of what an optimizer steps
        for slot, value in state_slots(optimizer, param).items():
            same = value.shape == shape
            boxed = BoxedTensor.like(param, value) if same else BoxedTensor.from_param(value)
            state[f"{canonical_name(name, param)}.{slot}"] = boxed
    return state
