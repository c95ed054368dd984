"""An optimizer's full state dict on one rank, as torch's own has it, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import all_gather_object
from cai_mesh.errors import PlanError
from cai_mesh.layout import SIGNATURE, BoxedTensor, canonical_name
from cai_zero.full_state.exchange import Exchange
from cai_zero.full_state.weights import device_of, reshard
from cai_zero.state import optimizer_state, restore_groups

_NO_OPTIONS = ("params", "param_names", SIGNATURE)
_Slots = dict[tuple[int, str], tuple[int, ...]]


def full_optimizer_state_dict(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    *,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict that the optimizer would have over the unsharded model, on one rank; empty on others. Collective.

    A plain loop's `optimizer.load_state_dict` takes it, and `load_full_optimizer_state_dict` in any stage and under
    offload. State that was not there yet is zero.

    Args:
        optimizer: one of any ZeRO stage, of an offloaded model, or over parameters of any other layout.
        model: the model whose parameters it steps.
        rank, group: as for `full_state_dict`.

    Raises `PlanError` for parameters the model does not have.
    """
    exchange = Exchange.of(rank, group, device_of(model))
    reshard(model)
    numbers = _numbers(optimizer, model)
    full = exchange.gathered(_boxes(optimizer, model))
    if not exchange.is_full:
        return {}
    state: dict[int, dict[str, torch.Tensor]] = {}
    for key, value in full.items():
        name, _, slot = key.rpartition(".")
        state.setdefault(numbers[name], {})[slot] = value
    return {"state": dict(sorted(state.items())), "param_groups": _groups(optimizer)}


def load_full_optimizer_state_dict(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    state: Mapping[str, Any],
    *,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill an optimizer's state, on any layout, and its param groups from a full state dict on one rank. Collective.

    Args:
        optimizer, model: as for `full_optimizer_state_dict`.
        state: a result of that, or the state dict of a plain optimizer over the same parameters in the same groups.
        rank, group: as for `full_state_dict`.

    Raises `PlanError` on all ranks where groups, parameters, names or shapes of state differ; nothing has been written
    then.
    """
    exchange = Exchange.of(rank, group, device_of(model))
    reshard(model)
    numbers = _numbers(optimizer, model)
    boxes = _boxes(optimizer, model)
    expected = exchange.shapes(boxes)
    saved = all_gather_object(_description(state) if exchange.is_full else None, exchange.group)[rank]
    _check_groups(saved[0], _groups(optimizer))
    _check_slots(saved[1], {_place(key, numbers): shape for key, shape in expected.items()})
    full: dict[str, torch.Tensor] = {}
    if exchange.is_full:
        for key, shape in expected.items():
            number, slot = _place(key, numbers)
            value = state["state"].get(number, {}).get(slot)
            full[key] = torch.zeros(shape) if value is None else torch.as_tensor(value)
    exchange.scatter(boxes, full)
    options = [
        {name: value for name, value in group.items() if name not in _NO_OPTIONS} for group in saved[0]
    ]
    getattr(optimizer, "restore_groups", lambda groups: restore_groups(optimizer, groups))(options)


def _members(optimizer: torch.optim.Optimizer) -> list[list[nn.Parameter]]:
    """The model's parameters in each group, which a sharded optimizer steps pieces of."""
    groups = getattr(optimizer, "member_groups", None)
    return [group["params"] for group in optimizer.param_groups] if groups is None else groups


def _numbers(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, int]:
    """The number of every parameter in a state dict, by canonical name."""
    names = {id(param): canonical_name(name, param) for name, param in model.named_parameters()}
    params = [param for group in _members(optimizer) for param in group]
    strangers = [tuple(param.shape) for param in params if id(param) not in names]
    if strangers:
        raise PlanError(
            "the optimizer holds parameters the model does not have",
            got=f"{len(strangers)} of them, the first of shape {strangers[0]}",
            fix="pass the model whose parameters it steps",
        )
    return {names[id(param)]: number for number, param in enumerate(params)}


def _boxes(optimizer: torch.optim.Optimizer, model: nn.Module) -> dict[str, BoxedTensor]:
    """This rank's boxes of the state, by `NAME.SLOT`."""
    method = getattr(optimizer, "state_for_checkpoint", None)
    state = method() if method is not None else optimizer_state(optimizer, model)
    return {key: value for key, value in state.items() if isinstance(value, BoxedTensor)}


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The param groups of a state dict: options, and the numbers of all parameters."""
    groups, first = list[dict[str, Any]](), 0
    for group, members in zip(optimizer.param_groups, _members(optimizer), strict=True):
        options = {name: _plain(value) for name, value in group.items() if name not in _NO_OPTIONS}
        groups.append({**options, "params": list(range(first, first + len(members)))})
        first += len(members)
    return groups


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) and not value.dim() else value


def _place(key: str, numbers: Mapping[str, int]) -> tuple[int, str]:
    name, _, slot = key.rpartition(".")
    return numbers[name], slot


def _description(state: Mapping[str, Any]) -> tuple[list[dict[str, Any]], _Slots]:
    """Groups, and the shapes of state by number and slot."""
    shapes = {
        (number, slot): tuple(torch.as_tensor(value).shape)
        for number, slots in state["state"].items()
        for slot, value in slots.items()
        if value is not None
    }
    return [{name: _plain(value) for name, value in group.items()} for group in state["param_groups"]], shapes


def _check_groups(saved: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    sizes = [len(group["params"]) for group in saved], [len(group["params"]) for group in expected]
    if sizes[0] != sizes[1]:
        raise PlanError(
            "the state dict is of an optimizer with other param groups",
            got=f"groups of {sizes[0]} parameters",
            expected=f"groups of {sizes[1]}",
            fix="build the optimizer as it was built then; add groups that were added on the way before loading",
        )


def _check_slots(saved: _Slots, expected: _Slots) -> None:
    rows = [
        f"parameter {number}, {slot}: state dict {shape}, this optimizer {expected.get((number, slot), 'nothing')}"
        for (number, slot), shape in saved.items()
        if expected.get((number, slot)) != shape
    ]
    if rows:
        raise PlanError(
            f"the state dict is of another optimizer, or of parts: {len(rows)} of {len(saved)} tensors differ",
            got="\n            ".join(rows[:8]),
            fix="load what full_optimizer_state_dict gave, or a plain optimizer's state dict; an optimizer under "
            "offload that is not Adam has its state after its first step",
        )
