"""Parameters of an optimizer in chunks, for stages 0 to 2: which share one, and in which order they reduce."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, check_no_gradients
from cai_mesh.layout import (
    BoxedTensor,
    FlatChunk,
    ReduceSpec,
    Slice,
    attach,
    canonical_name,
    reduce_of,
)
from cai_mesh.protocols import CommHandle
from cai_mesh.storage import check_parameters
from cai_mesh.storage import units as all_units
from cai_zero.precision import MixedPrecision
from cai_zero.ranks import DataRanks, RankTable
from cai_zero.reducer import Reducible

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""Consecutive blocks share a chunk until it has this many elements."""

Units = dict[nn.Module, list[tuple[str, nn.Parameter]]]


@dataclass(eq=False)
class Chunk:
    """One chunk of parameters and what belongs to it.

    Args:
        group: index of the param group.
        spec: how its gradients are reduced.
        params, chunk: the parameters and where they lie.
        weights: [chunk.numel] in compute dtype, which the parameters are views of.
        flat: this rank's shard in master dtype, which the optimizer steps.
        buffer: where the gradients accumulate until they are reduced.
        units: modules whose backward gives the gradients.
        low: first element of this rank's shard.
        ranks: who shares the parameters.
        reduced: this rank's shard of the gradient, summed over the reductions of the step.
        reducible: how its gradients are reduced.
        ready: units whose gradients of this pass are complete.
        collected: whether all gradients of this pass are in `buffer`.
        pending: whether a pass has ended without a reduction; alike on all ranks, whatever they have used.
        gathering: the gather of the new parameters after a step, while it is under way.
    """

    group: int
    spec: ReduceSpec
    params: list[nn.Parameter]
    chunk: FlatChunk
    weights: torch.Tensor
    flat: nn.Parameter
    buffer: GradBuffer
    units: set[nn.Module]
    low: int
    ranks: DataRanks
    reduced: torch.Tensor | None = None
    ready: set[nn.Module] = field(default_factory=set)
    collected: bool = False
    pending: bool = False
    gathering: CommHandle | None = None

    def __post_init__(self) -> None:
        self.reducible = Reducible(self.buffer, self.spec, self.ranks, self._add_reduced)

    def _add_reduced(self, shard: torch.Tensor) -> None:
        self.pending, self.flat.grad = False, None
        self.reduced = shard if self.reduced is None else self.reduced.add_(shard)

    def wait_gathered(self) -> None:
        """Return once the parameters are those of the last step."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard of `weights`."""
        return self.weights[self.low : self.low + self.chunk.shard_numel]

    @property
    def has_master(self) -> bool:
        """Whether `flat` is a copy, in another dtype or not rounded, and not a view of `weights`."""
        return self.flat.data_ptr() != self.shard.data_ptr()

    def boxed(self, flat: torch.Tensor) -> dict[str, BoxedTensor]:
        """Boxes, by canonical name, of a tensor laid out as `flat`; the pieces are views."""
        return {name: self.owned(value) for name, value in self.chunk.boxed(flat, self.low).items()}

    def owned(self, value: BoxedTensor) -> BoxedTensor:
        """The value, written by this rank only if it owns the parameters."""
        return BoxedTensor(value.global_shape, value.dtype, value.pieces, self.spec.owner)


def optimizer_units(inner: torch.optim.Optimizer, model: nn.Module | None) -> Units:
    """The optimizer's parameters by unit, with names; one unit of unnamed parameters where there is no model."""
    held = [param for group in inner.param_groups for param in group["params"]]
    if inner.state:
        raise PlanError(
            "the optimizer already has state",
            cause="it has stepped, or is one that makes its state when it is built (Adagrad)",
            fix="shard it before its first step; an optimizer over a model of shard_module may be any",
        )
    if len({id(p) for p in held}) != len(held):
        raise PlanError("a parameter is in the optimizer twice", fix="give every parameter to one group")
    if model is None:
        units = {nn.Module(): [(f"param.{i}", p) for i, p in enumerate(held) if p.requires_grad]}
    else:
        _check_owned(held, model)
        wanted = {id(p) for p in held if p.requires_grad}
        found = all_units(model)
        units = {m: [(n, p) for n, p in params if id(p) in wanted] for m, params in found.items()}
        units = {m: params for m, params in units.items() if params}
    if not any(units.values()):
        raise PlanError("the optimizer has no trainable parameter")
    check_parameters(pair for params in units.values() for pair in params)
    check_no_gradients(p for params in units.values() for _, p in params)
    return units


def build_chunks(
    inner: torch.optim.Optimizer,
    units: Units,
    table: RankTable,
    precision: MixedPrecision,
    before_open: Callable[[], None] = lambda: None,
    *,
    apart: bool = False,
) -> list[Chunk]:
    """Move the parameters into chunks, each a view from then on, and cut this rank's shards.

    `before_open` is called before a chunk's gradients take memory. `apart`: shards are never a view of the parameters.
    """
    return [_build(*bucket, table, precision, before_open, apart) for bucket in _buckets(inner, units)]


def _build(
    group: int,
    spec: ReduceSpec,
    params: list[tuple[str, nn.Parameter]],
    units: set[nn.Module],
    table: RankTable,
    precision: MixedPrecision,
    before_open: Callable[[], None],
    apart: bool,
) -> Chunk:
    ranks = table.of(spec)
    chunk = FlatChunk(params, world=ranks.size)
    tensors = [param for _, param in params]
    compute, master, reduce = precision.resolve(tensors[0].dtype)
    weights = chunk.allocate(compute, tensors[0].device)
    low, high = chunk.shard_range(ranks.index)
    shard = weights[low:high]
    if master != compute or apart:
        full = chunk.allocate(master, tensors[0].device)
        chunk.fill(full, tensors)
        shard = full[low:high].clone()
        del full
    chunk.fill(weights, tensors)
    flat = nn.Parameter(shard)
    attach(flat, slices=_slices(chunk, low, high, spec, frozenset(ranks.shard_axes)))
    for param, view in zip(tensors, chunk.views(weights), strict=True):
        param.data = view
    buffer = GradBuffer(chunk, tensors, reduce, weights.device, before_open=before_open)
    return Chunk(group, spec, tensors, chunk, weights, flat, buffer, units, low, ranks)


def reduction_order(chunks: Sequence[Chunk], units: Units, model: nn.Module | None) -> list[Chunk]:
    """The order in which chunks reduce while backward runs, the same on every rank whatever a rank has used.

    A chunk is complete with the unit that comes first in forward, so chunks follow in the reverse order of those;
    the model itself holds the embeddings and comes last. Tied parameters are left out: they wait for `finish`.
    """
    position = {unit: -1 if unit is model else i for i, unit in enumerate(units)}
    free = [chunk for chunk in chunks if chunk.spec.tied is None]
    return sorted(free, key=lambda chunk: -min(position[unit] for unit in chunk.units))


def _check_owned(held: Sequence[torch.Tensor], model: nn.Module) -> None:
    own = {id(p) for p in model.parameters()}
    strangers = [tuple(p.shape) for p in held if id(p) not in own]
    if strangers:
        raise PlanError(
            "the optimizer holds parameters the model does not have",
            got=f"{len(strangers)} of them, the first of shape {strangers[0]}",
            cause="the optimizer was built on another model, or before a transform replaced its parameters",
            fix="build the optimizer on model.parameters() after every other transform",
        )


def _buckets(inner: torch.optim.Optimizer, units: Units):
    """(param group, reduce spec, [(name, parameter)], units) of every chunk, in the order of the units."""
    groups = {id(p): i for i, group in enumerate(inner.param_groups) for p in group["params"]}
    open_buckets: dict[tuple, tuple[int, ReduceSpec, list, set]] = {}
    done = []
    for unit, params in units.items():
        for name, param in params:
            spec = reduce_of(param)
            key = (groups[id(param)], param.dtype, param.device, spec)
            _, _, held, members = open_buckets.setdefault(key, (key[0], spec, [], set()))
            held.append((canonical_name(name, param), param))
            members.add(unit)
        for key in [k for k, b in open_buckets.items() if sum(p.numel() for _, p in b[2]) >= BUCKET_ELEMENTS]:
            done.append(open_buckets.pop(key))
    return done + list(open_buckets.values())


def _slices(
    chunk: FlatChunk, low: int, high: int, spec: ReduceSpec, shard_axes: frozenset[str]
) -> tuple[Slice, ...]:
    """One for every slot of the chunk, empty where this rank holds nothing of it."""
    held = {part.slot.name: part for part in chunk.overlaps(low, high)}
    slices = []
    for slot in chunk.slots:
        part = held.get(slot.name)
        bounds, start = ((part.low, part.high), part.start) if part else ((0, 0), 0)
        axes = slot.layout.sharded_axes | shard_axes
        slices.append(Slice(slot.name, slot.layout, bounds, start, axes, spec.owner))
    return tuple(slices)
