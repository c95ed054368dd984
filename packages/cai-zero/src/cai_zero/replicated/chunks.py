"""Parameters of an optimizer in chunks, for stages 0 to 2: which share one, and in which order they reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from cai_mesh.comm import ParallelMesh
from cai_mesh.gradients import GradBuffer, Place
from cai_mesh.layout import (
    BoxedTensor,
    FlatChunk,
    ReduceSpec,
    Slice,
    attach,
    canonical_name,
    reduce_of,
)
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.ranks import DataRanks, RankTable, groups_along
from cai_zero.replicated.chunk_gradients import ChunkGradients
from cai_zero.replicated.chunk_weights import ChunkWeights
from cai_zero.replicated.halves import Halves, split

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""Consecutive blocks share a chunk until it has this many elements."""

Units = dict[nn.Module, list[tuple[str, nn.Parameter]]]
Groups = Mapping[int, int]


@dataclass(eq=False)
class Chunk:
    """One chunk of parameters and this rank's shard of it: what never changes, and the two parts that do.

    Args:
        group: index of the param group.
        spec: the reduction of its gradients.
        params, chunk: the parameters and their order in memory.
        low: first element of this rank's shard.
        slices: each parameter's part of the shard.
        ranks, mesh: the ranks that share the parameters.
        weights: the parameters and their master weights now.
        gradients: the gradients of the step.
    """

    group: int
    spec: ReduceSpec
    params: list[nn.Parameter]
    chunk: FlatChunk
    low: int
    slices: tuple[Slice, ...]
    ranks: DataRanks
    mesh: ParallelMesh | None
    weights: ChunkWeights
    gradients: ChunkGradients

    @cached_property
    def places(self) -> list[Place]:
        """The places of this rank's parts of the parameters' gradients in what users see of them."""
        return [self._place(param, part) for param, part in zip(self.params, self.slices, strict=True)]

    def _place(self, param: nn.Parameter, part: Slice) -> Place:
        sums, complete = groups_along(self.mesh, part.axes)
        shape, shard = torch.Size(param.shape), self.ranks.shard
        return Place(shape, *part.range, shard, sums, beyond=not complete, axes=part.axes, owner=part.owner)

    def boxed(self, flat: torch.Tensor) -> dict[str, BoxedTensor]:
        """Boxes, by canonical name, of a tensor laid out as the shard; the pieces are views."""
        return {name: self.owned(value) for name, value in self.chunk.boxed(flat, self.low).items()}

    @cached_property
    def master_boxes(self) -> dict[str, BoxedTensor]:
        """Boxes of master weights by name, made while the numbers are there; views that see them whenever they are."""
        return self.boxed(self.weights.flat.detach())

    @cached_property
    def master_shapes(self) -> dict[str, BoxedTensor]:
        """The same on the meta device."""
        flat = self.weights.flat
        return self.boxed(torch.empty(flat.shape, dtype=flat.dtype, device="meta"))

    def boxed_slot(
        self, tensor: torch.Tensor, piece: torch.Tensor, start: int, name: str
    ) -> BoxedTensor | None:
        """State of a piece: laid out as it, a view (None where it is empty), or a value for the whole parameter."""
        if tensor.shape != piece.shape:
            return self.owned(BoxedTensor.from_param(tensor))
        boxes = self.chunk.boxed(tensor, self.low + start)
        return self.owned(boxes[name]) if name in boxes else None

    def owned(self, value: BoxedTensor) -> BoxedTensor:
        """The value, written by this rank only if it owns the parameters."""
        return BoxedTensor(value.global_shape, value.dtype, value.pieces, self.spec.owner)


def build_chunks(
    groups: Groups,
    units: Units,
    table: RankTable,
    precision: MixedPrecision,
    before_open: Callable[[], None] = lambda: None,
    *,
    apart: bool = False,
) -> list[Chunk]:
    """Move the parameters into chunks, each a view from then on, and cut this rank's shards.

    Args:
        groups: index of the param group by id of the parameter.
        before_open: called before a chunk's gradients take memory.
        apart: shards are never a view of the parameters.
    """
    return [_build(*bucket, table, precision, before_open, apart) for bucket in _buckets(groups, units)]


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
    unsharded = chunk.allocate(compute, tensors[0].device)
    low, high = chunk.shard_range(ranks.index)
    shard = unsharded[low:high]
    chunk.fill(unsharded, tensors)
    if master != compute or apart:
        full = chunk.allocate(master, tensors[0].device)
        chunk.fill(full, tensors)
        shard = full[low:high].clone()
        if precision.split_master:
            split(full, unsharded)  # rounded as its shards will be
        del full
    flat = nn.Parameter(shard)
    slices = _slices(chunk, low, high, spec, frozenset(ranks.shard_axes))
    attach(flat, slices=slices)
    pieces = [_piece(shard, part) for part in slices]
    for param, view in zip(tensors, chunk.views(unsharded), strict=True):
        param.data = view
    buffer = GradBuffer(chunk, tensors, reduce, unsharded.device, before_open=before_open)
    ranges = [slice(part.start, part.stop) for part in slices]
    rank_shard = unsharded[low:high]
    halves = Halves(flat, ranges, rank_shard) if precision.split_master else None
    weights = ChunkWeights(chunk.names, tensors, ranges, unsharded, rank_shard, flat, pieces, halves)
    weights.split()
    gradients = ChunkGradients(tensors, ranges, flat, units, buffer, spec, ranks)
    return Chunk(group, spec, tensors, chunk, low, slices, ranks, table.mesh, weights, gradients)


def _piece(shard: torch.Tensor, part: Slice) -> nn.Parameter:
    """One parameter's part of a shard, for the optimizer."""
    piece = nn.Parameter(shard[part.start : part.stop])
    attach(piece, slices=(replace(part, start=0),))
    return piece


def reduction_order(
    chunks: Sequence[Chunk], units: Sequence[nn.Module], model: nn.Module | None
) -> list[Chunk]:
    """The order in which chunks reduce while backward runs, the same on every rank whatever a rank has used.

    A chunk is complete with the unit that comes first in forward, so chunks follow in the reverse order of those;
    the model itself holds the embeddings and comes last. Tied parameters are left out: they wait for `finish`.

    Args:
        units: all of them, in the order of forward.
    """
    position = {unit: -1 if unit is model else i for i, unit in enumerate(units)}
    free = [chunk for chunk in chunks if chunk.spec.tied is None]
    return sorted(free, key=lambda chunk: -min(position[unit] for unit in chunk.gradients.units))


def _buckets(groups: Groups, units: Units):
    """(param group, reduce spec, [(name, parameter)], units) of every chunk, in the order of the units."""
    open_buckets: dict[tuple, tuple[int, ReduceSpec, list, set]] = {}
    done = []
    for unit, params in units.items():
        for name, param in params:
            spec = reduce_of(param)
            key = (groups[id(param)], param.dtype, param.device, spec)
            _, _, named_params, members = open_buckets.setdefault(key, (key[0], spec, [], set()))
            named_params.append((canonical_name(name, param), param))
            members.add(unit)
        for key in [k for k, b in open_buckets.items() if sum(p.numel() for _, p in b[2]) >= BUCKET_ELEMENTS]:
            done.append(open_buckets.pop(key))
    return done + list(open_buckets.values())


def _slices(
    chunk: FlatChunk, low: int, high: int, spec: ReduceSpec, shard_axes: frozenset[str]
) -> tuple[Slice, ...]:
    """One for every slot of the chunk, empty where this rank holds nothing of it."""
    parts = {part.slot.name: part for part in chunk.overlaps(low, high)}
    slices = []
    for slot in chunk.slots:
        part = parts.get(slot.name)
        bounds, start = ((part.low, part.high), part.start) if part else ((0, 0), 0)
        axes = slot.layout.sharded_axes | shard_axes
        slices.append(Slice(slot.name, slot.layout, bounds, start, axes, spec.owner))
    return tuple(slices)
