"""The state of an optimizer by parameter name, so that it can be saved and loaded on any layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import local_gradient, plain
from cai_mesh.layout import SIGNATURE, BoxedTensor, canonical_name, note_writes

AT_ONCE = 256 * 2**20
"""Bytes of parameters that one step with zeros takes, of several."""


def initialize_state(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer allocate the state it lacks, changing nothing: steps with zero gradients, rate and decay.

    A fresh one lacks all, one that has stepped that of parameters that never had a gradient. A step is of few
    parameters, as zeros and copies of all would take more memory than training does.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    missing = [p for p in params if p.requires_grad and p not in optimizer.state]
    if not missing:
        return
    gradients = [(p, local_gradient(p)) for p in params]
    options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    for some in _by_size(missing):
        with plain(params):  # a step of shards shows them again
            _step_with_zeros(optimizer, params, some)
    for group, before in zip(optimizer.param_groups, options, strict=True):
        _set_back(group, before)
    with torch.no_grad(), plain(params):
        for p, grad in gradients:
            p.grad = grad
    note_writes()


def _by_size(params: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Parameters in order, so many at a time as are small together, or one that is larger.

    Of shards, whole parameters count: ranks that share them step as often.
    """
    some, size = list[torch.Tensor](), 0
    for param in params:
        nbytes = param.shape.numel() * param.itemsize  # `nbytes` of a shard is the shard's
        if some and size + nbytes > AT_ONCE:
            yield some
            some, size = [], 0
        some.append(param)
        size += nbytes
    yield some


def _step_with_zeros(
    optimizer: torch.optim.Optimizer, params: list[torch.Tensor], some: list[torch.Tensor]
) -> None:
    """Step some of the parameters; no other has a gradient."""
    values = [p.detach().clone() for p in some]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        if "weight_decay" in group:
            group["weight_decay"] = 0.0  # decay that joins the gradient would enter the moments
    for p in params:
        p.grad = None
    for p in some:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    with torch.no_grad(), plain(params):
        for p, value in zip(some, values, strict=True):
            p.grad = None
            p.copy_(value)
            step = optimizer.state[p].get("step")
            if isinstance(step, torch.Tensor):
                step.zero_()
            elif isinstance(step, int):
                optimizer.state[p]["step"] = 0


def _set_back(group: dict[str, Any], before: dict[str, Any]) -> None:
    """Undo what steps did to a group: its options, and counts that it did not have."""
    for key, value in group.items():
        if key in before:
            group[key] = before[key]
        elif type(value) is int:
            group[key] = 0


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
