"""Full tensors from parts and back: a complete state dict on one rank, one tensor after the other.

For code that knows nothing of shards: `save_pretrained`, peft's adapters, `torch.save`. A checkpoint to resume from is
`cai_mesh.checkpoint.save`, and a directory of safetensors `cai_mesh.checkpoint.save_hf`; neither gathers anything.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import all_gather_object, receive, send
from cai_mesh.errors import PlanError
from cai_mesh.layout import Box, BoxedTensor, canonical_name


@dataclass(frozen=True)
class _Holding:
    """One rank's part of one tensor, without its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[Box, ...]
    owner: bool


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
    group, local_rank = _group(group)
    mine, plain = _entries(model, _boxes_of(weights, group), only)
    table = all_gather_object({name: _holding(boxed) for name, boxed in mine.items()}, group)
    everyone = _sources(table)
    full: dict[str, torch.Tensor] = {}
    for name, sources in everyone.items():
        shape, source_dtype = sources[0][1].shape, sources[0][1].dtype
        target = dtype if dtype is not None and source_dtype.is_floating_point else source_dtype
        if local_rank == rank:
            full[name] = torch.empty(shape, dtype=target)
        for source, holding in sources:
            if source == local_rank == rank:
                for box, view in _pieces(mine[name], holding.boxes):
                    full[name][box.slices()] = view.to("cpu", target)
            elif source == local_rank:
                _send([view for _, view in _pieces(mine[name], holding.boxes)], rank, group)
            elif local_rank == rank:
                _receive(full[name], holding, source, group, _device(model))
    return _named(model, full, plain, only) if local_rank == rank else {}


@torch.no_grad()
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
    group, local_rank = _group(group)
    mine, _ = _entries(model, _boxes_of(weights, group), None)
    shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    state_shapes = all_gather_object(shapes if local_rank == rank else None, group)[rank]
    table = all_gather_object({name: _holding(boxed) for name, boxed in mine.items()}, group)
    names = {name: _alias(model, name, state_shapes) for row in table for name in row}
    _compare({name: holding.shape for row in table for name, holding in row.items()}, names, state_shapes)
    for name in dict.fromkeys(name for row in table for name in row):
        for other, holding in enumerate(row.get(name) for row in table):
            if holding is None:
                continue
            if other == local_rank == rank:
                for box, view in mine[name].present.pieces:
                    view.copy_(state[names[name]][box.slices()])
            elif local_rank == rank:
                parts = [state[names[name]][box.slices()].to(holding.dtype) for box in holding.boxes]
                _send(parts, other, group, _device(model))
            elif other == local_rank:
                _fill(mine[name], rank, group)


def _group(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int]:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group, group.rank() if group is not None else 0


def _boxes_of(
    weights: Mapping[str, BoxedTensor] | None, group: dist.ProcessGroup | None
) -> dict[str, BoxedTensor]:
    """This rank's boxes of weights, none of them where only other ranks have some."""
    mine = dict(weights or {})
    for specs in all_gather_object({n: (b.global_shape, b.dtype) for n, b in mine.items()}, group):
        for name, (shape, dtype) in specs.items():
            mine.setdefault(name, BoxedTensor(shape, dtype, ()))
    return mine


def _entries(
    model: nn.Module, weights: Mapping[str, BoxedTensor], only: Callable[[str], bool] | None
) -> tuple[dict[str, BoxedTensor], dict[str, Any]]:
    """Boxes of every distinct tensor by the first of its names, and the values that are no tensors."""
    for module in model.modules():
        sharding = getattr(module, "cai_sharding", None)
        if sharding is not None:
            sharding.reshard(module)  # a forward without a backward leaves some of it unsharded
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


def _holding(boxed: BoxedTensor) -> _Holding:
    return _Holding(
        tuple(boxed.global_shape), boxed.dtype, tuple(box for box, _ in boxed.pieces), boxed.owner
    )


def _sources(table: list[dict[str, _Holding]]) -> dict[str, list[tuple[int, _Holding]]]:
    """Return who sends which boxes, by name: each distinct box once, from an owner where there is one."""
    sources: dict[str, list[tuple[int, _Holding]]] = {}
    for name in dict.fromkeys(name for row in table for name in row):
        holders = sorted(
            ((index, row[name]) for index, row in enumerate(table) if name in row),
            key=lambda holder: (not holder[1].owner, holder[0]),
        )
        sent: set[Box] = set()
        for index, holding in holders:
            boxes = tuple(box for box in holding.boxes if box not in sent)
            sent.update(boxes)
            sources.setdefault(name, []).append(
                (index, _Holding(holding.shape, holding.dtype, boxes, holding.owner))
            )
        shape, covered = holders[0][1].shape, sum(math.prod(box.shape) for box in sent)
        if covered < math.prod(shape):
            raise PlanError(
                f"no rank of the group holds all of {name!r}",
                got=f"{covered} of {math.prod(shape)} elements",
                fix="pass the group of all ranks over which the model is sharded",
            )
    return sources


def _pieces(boxed: BoxedTensor, boxes: tuple[Box, ...]) -> list[tuple[Box, torch.Tensor]]:
    return [(box, view.detach()) for box, view in boxed.present.pieces if box in boxes]


def _send(
    parts: list[torch.Tensor], to: int, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> None:
    if parts:
        send(torch.cat([part.reshape(-1) for part in parts]).to(device), to, group)


def _receive(
    full: torch.Tensor, holding: _Holding, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Receive one rank's boxes and put them in their places."""
    if not holding.boxes:
        return
    sizes = [math.prod(box.shape) for box in holding.boxes]
    buffer = torch.empty(sum(sizes), dtype=holding.dtype, device=device)
    receive(buffer, source, group)
    for box, part in zip(holding.boxes, buffer.cpu().split(sizes), strict=True):
        full[box.slices()] = part.view(box.shape)


def _fill(boxed: BoxedTensor, source: int, group: dist.ProcessGroup | None) -> None:
    if not boxed.pieces:
        return
    pieces = boxed.present.pieces
    sizes = [view.numel() for _, view in pieces]
    buffer = torch.empty(sum(sizes), dtype=boxed.dtype, device=pieces[0][1].device)
    receive(buffer, source, group)
    for (_, view), part in zip(pieces, buffer.split(sizes), strict=True):
        view.copy_(part.view(view.shape))


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


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
