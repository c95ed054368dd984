"""A model's full state dict on one rank, and back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import all_gather_object
from cai_mesh.errors import PlanError
from cai_mesh.layout import BoxedTensor, canonical_name
from cai_zero.full_state.exchange import Exchange


def full_state_dict(
    model: nn.Module,
    *,
    weights: Mapping[str, BoxedTensor] | None = None,
    only: Callable[[str], bool] | None = None,
    dtype: torch.dtype | None = None,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Any]:
    """The state dict of the unsharded model, in host memory on one rank; empty on the others. Collective.

    Args:
        model: a model of any ZeRO stage, or with parameters of any other layout; names are those of its `state_dict`.
        weights: boxes to take in place of the parameters of those canonical names: `optimizer.weights()` of stages
            0 to 2 for float32 master weights. Stage 3 keeps them in the parameters themselves.
        only: takes a name of the state dict and says whether to include it; the same on all ranks. None: all.
        dtype: the dtype of floating-point tensors in the result; None: each tensor's own.
        rank: index in the group of the rank that receives.
        group: all ranks that hold parts; None: all ranks of the job, or one process without torch.distributed.

    Every rank sends the boxes that no earlier rank has, tensor by tensor, so beside the result there is never more
    than one rank's part of one tensor in memory, on device or host. Tied entries share one tensor.

    Raises `PlanError` on all ranks when no rank holds some part of a tensor.
    """
    exchange = Exchange.of(rank, group, device_of(model))
    mine, plain = _entries(model, _boxes_of(weights, exchange), only)
    full = exchange.gathered(mine, dtype)
    return _named(model, full, plain, only) if exchange.is_full else {}


def load_full_state_dict(
    model: nn.Module,
    state: Mapping[str, torch.Tensor],
    *,
    weights: Mapping[str, BoxedTensor] | None = None,
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill a model's parameters and buffers, on any layout, from a full state dict on one rank. Collective.

    Args:
        model: a model of any ZeRO stage.
        state: names as in `full_state_dict`; read on rank `rank` only. Values of another dtype are converted. Of tied
            entries one is enough.
        weights: boxes to fill in place of the parameters of those canonical names. For stages 0 to 2 pass
            `optimizer.weights()` and call `optimizer.publish()` afterwards.
        rank, group: as for `full_state_dict`.

    Raises `PlanError` on all ranks when names are missing or shapes differ; nothing has been written then.
    """
    exchange = Exchange.of(rank, group, device_of(model))
    mine, _ = _entries(model, _boxes_of(weights, exchange), None)
    shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    state_shapes = all_gather_object(shapes if exchange.is_full else None, exchange.group)[rank]
    expected = exchange.shapes(mine)
    names = {name: _alias(model, name, state_shapes) for name in expected}
    _compare(expected, names, state_shapes)
    exchange.scatter(mine, {name: state[names[name]] for name in expected} if exchange.is_full else {})


def _boxes_of(weights: Mapping[str, BoxedTensor] | None, exchange: Exchange) -> dict[str, BoxedTensor]:
    """This rank's boxes of weights, none of them where only other ranks have some."""
    mine = dict(weights or {})
    for specs in all_gather_object(
        {name: (box.global_shape, box.dtype) for name, box in mine.items()}, exchange.group
    ):
        for name, (shape, dtype) in specs.items():
            mine.setdefault(name, BoxedTensor(shape, dtype, ()))
    return mine


def _entries(
    model: nn.Module, weights: Mapping[str, BoxedTensor], only: Callable[[str], bool] | None
) -> tuple[dict[str, BoxedTensor], dict[str, Any]]:
    """Boxes of every distinct tensor by the first of its names, and the values that are no tensors."""
    reshard(model)
    boxes: dict[str, BoxedTensor] = {}
    plain: dict[str, Any] = {}
    for names, value in _distinct(model).values():
        included = [name for name in names if only is None or only(name)]
        if not included:
            continue
        if not isinstance(value, torch.Tensor):
            plain[included[0]] = value
            continue
        other = weights.get(canonical_name(names[0], value))
        boxes[names[0]] = other if other is not None else BoxedTensor.from_param(value)
    return boxes, plain


def _distinct(model: nn.Module) -> dict[int, tuple[list[str], Any]]:
    entries: dict[int, tuple[list[str], Any]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        entries.setdefault(id(value), ([], value))[0].append(name)
    return entries


def _named(
    model: nn.Module, full: dict[str, torch.Tensor], plain: dict[str, Any], only: Callable[[str], bool] | None
) -> dict[str, Any]:
    """Return entries in the order of the model's state dict, tied tensors by every name; then those of other ranks."""
    alias = {name: names[0] for names, _ in _distinct(model).values() for name in names}
    first = {name: alias[name] for name in model.state_dict(keep_vars=True)}
    values = {**full, **plain}
    ordered = {
        name: values[at] for name, at in first.items() if at in values and (only is None or only(name))
    }
    return ordered | {name: value for name, value in values.items() if name not in first}


def reshard(model: nn.Module) -> None:
    """Let parameters be shards, some of which a forward without a backward leaves unsharded."""
    for module in model.modules():
        sharding = getattr(module, "cai_sharding", None)
        if sharding is not None:
            sharding.reshard(module)


def device_of(model: nn.Module) -> torch.device:
    """The device of a model's parameters."""
    return next((param.device for param in model.parameters()), torch.device("cpu"))


def _alias(model: nn.Module, name: str, state: Mapping[str, Any]) -> str:
    """The name under which a tensor of the model stands in a state dict."""
    names = next((names for names, _ in _distinct(model).values() if name in names), [name])
    return next((n for n in (name, *names) if n in state), name)


def _compare(
    model_shapes: Mapping[str, tuple[int, ...]],
    names: Mapping[str, str],
    state_shapes: Mapping[str, tuple[int, ...]],
) -> None:
    rows = [
        f"{name}: this model {shape}, state {state_shapes.get(names[name], 'nothing')}"
        for name, shape in model_shapes.items()
        if state_shapes.get(names[name]) != tuple(shape)
    ]
    if rows:
        raise PlanError(
            f"the state dict is of another model: {len(rows)} of {len(model_shapes)} tensors differ",
            got="\n            ".join(rows[:8]),
        )
