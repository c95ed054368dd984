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
class _Held:
    """What one rank holds of one tensor, without its values."""

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
        model: of any ZeRO stage, or with parameters of any other layout; the names are those of its `state_dict`.
        weights: boxes to take in place of the parameters of those canonical names: `optimizer.weights()` of stages
            0 to 2 for float32 master weights. Stage 3 keeps them in the parameters themselves.
        only: takes a name of the state dict and says whether to include it; the same on all ranks. None: all.
        dtype: of floating-point tensors in the result; None: as each is held.
        rank: index in the group of the rank that receives.
        group: of all ranks that hold parts; None: all ranks of the job, or one process without torch.distributed.

    Every rank sends the boxes that no earlier rank has, tensor by tensor, so beside the result there is never more
    than one rank's part of one tensor in memory, on device or host. Tied entries share one tensor.

    Raises `PlanError` on all ranks when no rank holds some part of a tensor.
    """
    group, here = _group(group)
    mine, plain = _entries(model, _known(weights, group), only)
    table = all_gather_object({name: _held(boxed) for name, boxed in mine.items()}, group)
    everyone = _sources(table)
    full: dict[str, torch.Tensor] = {}
    for name, sources in everyone.items():
        shape, own = sources[0][1].shape, sources[0][1].dtype
        target = dtype if dtype is not None and own.is_floating_point else own
        if here == rank:
            full[name] = torch.empty(shape, dtype=target)
        for source, held in sources:
            if source == here == rank:
                for box, view in _pieces(mine[name], held.boxes):
                    full[name][box.slices()] = view.to("cpu", target)
            elif source == here:
                _send([view for _, view in _pieces(mine[name], held.boxes)], rank, group)
            elif here == rank:
                _receive(full[name], held, source, group, _device(model))
    return _named(model, full, plain, only) if here == rank else {}


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
        model: of any ZeRO stage.
        state: names as in `full_state_dict`; read on rank `rank` only. Values of another dtype are converted. Of tied
            entries one is enough.
        weights: boxes to fill in place of the parameters of those canonical names. For stages 0 to 2 pass
            `optimizer.weights()` and call `optimizer.publish()` afterwards.
        rank, group: as for `full_state_dict`.

    Raises `PlanError` on all ranks when names are missing or shapes differ; nothing has been written then.
    """
    group, here = _group(group)
    mine, _ = _entries(model, _known(weights, group), None)
    shapes = {name: tuple(value.shape) for name, value in state.items() if isinstance(value, torch.Tensor)}
    given = all_gather_object(shapes if here == rank else None, group)[rank]
    table = all_gather_object({name: _held(boxed) for name, boxed in mine.items()}, group)
    names = {name: _alias(model, name, given) for held in table for name in held}
    _compare({name: held.shape for row in table for name, held in row.items()}, names, given)
    for name in dict.fromkeys(name for held in table for name in held):
        for other, held in enumerate(row.get(name) for row in table):
            if held is None:
                continue
            if other == here == rank:
                for box, view in mine[name].present.pieces:
                    view.copy_(state[names[name]][box.slices()])
            elif here == rank:
                parts = [state[names[name]][box.slices()].to(held.dtype) for box in held.boxes]
                _send(parts, other, group, _device(model))
            elif other == here:
                _fill(mine[name], rank, group)


def _group(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int]:
    if group is None and dist.is_initialized():
        group = dist.group.WORLD
    return group, group.rank() if group is not None else 0


def _known(
    weights: Mapping[str, BoxedTensor] | None, group: dist.ProcessGroup | None
) -> dict[str, BoxedTensor]:
    """This rank's boxes of weights, none of them where only other ranks have some."""
    mine = dict(weights or {})
    for held in all_gather_object({n: (b.global_shape, b.dtype) for n, b in mine.items()}, group):
        for name, (shape, dtype) in held.items():
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
        kept = [name for name in names if only is None or only(name)]
        if not kept:
            continue
        if not isinstance(value, torch.Tensor):
            plain[kept[0]] = value
            continue
        other = weights.get(canonical_name(names[0], value))
        boxes[names[0]] = other if other is not None else BoxedTensor.from_param(value)
    return boxes, plain


def _distinct(model: nn.Module) -> dict[int, tuple[list[str], Any]]:
    found: dict[int, tuple[list[str], Any]] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found.setdefault(id(value), ([], value))[0].append(name)
    return found


def _named(
    model: nn.Module, full: dict[str, torch.Tensor], plain: dict[str, Any], only: Callable[[str], bool] | None
) -> dict[str, Any]:
    """In the order of the model's state dict, every name of a tied tensor included; then what other ranks have."""
    alias = {name: names[0] for names, _ in _distinct(model).values() for name in names}
    first = {name: alias[name] for name in model.state_dict(keep_vars=True)}
    found = {**full, **plain}
    ordered = {name: found[at] for name, at in first.items() if at in found and (only is None or only(name))}
    return ordered | {name: value for name, value in found.items() if name not in first}


def _held(boxed: BoxedTensor) -> _Held:
    return _Held(tuple(boxed.global_shape), boxed.dtype, tuple(box for box, _ in boxed.pieces), boxed.owner)


def _sources(table: list[dict[str, _Held]]) -> dict[str, list[tuple[int, _Held]]]:
    """By name, who sends which boxes: each distinct box once, from an owner where there is one."""
    found: dict[str, list[tuple[int, _Held]]] = {}
    for name in dict.fromkeys(name for held in table for name in held):
        holders = sorted(
            ((index, held[name]) for index, held in enumerate(table) if name in held),
            key=lambda holder: (not holder[1].owner, holder[0]),
        )
        taken: set[Box] = set()
        for index, held in holders:
            boxes = tuple(box for box in held.boxes if box not in taken)
            taken.update(boxes)
            found.setdefault(name, []).append((index, _Held(held.shape, held.dtype, boxes, held.owner)))
        shape, covered = holders[0][1].shape, sum(math.prod(box.shape) for box in taken)
        if covered < math.prod(shape):
            raise PlanError(
                f"no rank of the group holds all of {name!r}",
                got=f"{covered} of {math.prod(shape)} elements",
                fix="pass the group of all ranks over which the model is sharded",
            )
    return found


def _pieces(boxed: BoxedTensor, boxes: tuple[Box, ...]) -> list[tuple[Box, torch.Tensor]]:
    return [(box, view.detach()) for box, view in boxed.present.pieces if box in boxes]


def _send(
    parts: list[torch.Tensor], to: int, group: dist.ProcessGroup | None, device: torch.device | None = None
) -> None:
    if parts:
        send(torch.cat([part.reshape(-1) for part in parts]).to(device), to, group)


def _receive(
    full: torch.Tensor, held: _Held, source: int, group: dist.ProcessGroup | None, device: torch.device
) -> None:
    """Receive one rank's boxes and put them in their places."""
    if not held.boxes:
        return
    sizes = [math.prod(box.shape) for box in held.boxes]
    buffer = torch.empty(sum(sizes), dtype=held.dtype, device=device)
    receive(buffer, source, group)
    for box, part in zip(held.boxes, buffer.cpu().split(sizes), strict=True):
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


def _alias(model: nn.Module, name: str, given: Mapping[str, Any]) -> str:
    """The name under which a tensor of the model stands in the given state."""
    names = next((names for names, _ in _distinct(model).values() if name in names), [name])
    return next((n for n in (name, *names) if n in given), name)


def _compare(
    wanted: Mapping[str, tuple[int, ...]], names: Mapping[str, str], given: Mapping[str, tuple[int, ...]]
) -> None:
    rows = [
        f"{name}: this model {shape}, state {given.get(names[name], 'nothing')}"
        for name, shape in wanted.items()
        if given.get(names[name]) != tuple(shape)
    ]
    if rows:
        raise PlanError(
            f"the state dict is of another model: {len(rows)} of {len(wanted)} tensors differ",
            got="\n            ".join(rows[:8]),
        )
