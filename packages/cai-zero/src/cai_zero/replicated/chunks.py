"""Parameters of an optimizer in chunks, for stages 0 to 2: which share one, and in which order they reduce."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from cai_mesh.comm import ParallelMesh
from cai_mesh.errors import PlanError
from cai_mesh.gradients import GradBuffer, Place, set_raw_grad
from cai_mesh.layout import (
    BoxedTensor,
    FlatChunk,
    ReduceSpec,
    Slice,
    attach,
    canonical_name,
    record_of,
    reduce_of,
)
from cai_mesh.protocols import CommHandle
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.ranks import DataRanks, RankTable, groups_along
from cai_zero.reduction.reducer import Reducible
from cai_zero.replicated.halves import Halves, split

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""Consecutive blocks share a chunk until it has this many elements."""

Units = dict[nn.Module, list[tuple[str, nn.Parameter]]]
Groups = Mapping[int, int]


@dataclass(eq=False)
class Chunk:
    """One chunk of parameters and what belongs to it.

    Args:
        group: index of the param group.
        spec: how its gradients are reduced.
        params, chunk: the parameters and where they lie.
        weights: [chunk.numel] in compute dtype, which the parameters are views of.
        flat: this rank's shard in master dtype, once `join` has returned; its `.grad` is that of the coming step, once
            reduced.
        pieces: each parameter's part of it, 1-d and perhaps empty, which the optimizer steps.
        buffer: where the gradients accumulate until they are reduced.
        units: modules whose backward gives the gradients.
        low: first element of this rank's shard.
        ranks, mesh: who shares the parameters.
        reduced: this rank's shard of the gradient, summed over the reductions of the step.
        dropped: parameters whose gradients in `reduced` have been dropped since.
        absent: parameters without a gradient in this step, on any rank; None until the ranks have agreed.
        reducible: how its gradients are reduced.
        ready: units whose gradients of this pass are complete.
        collected: whether all gradients of this pass are in `buffer`.
        pending: whether a pass has ended without a reduction; alike on all ranks, whatever they have used.
        gathering: the gather of the new parameters after a step, while it is under way.
        versions: of the parameters, as of the last gather; `lent`: whose memory was asked for since.
        halves: where master weights are in halves while nobody needs them.
    """

    group: int
    spec: ReduceSpec
    params: list[nn.Parameter]
    chunk: FlatChunk
    weights: torch.Tensor
    flat: nn.Parameter
    pieces: list[nn.Parameter]
    buffer: GradBuffer
    units: set[nn.Module]
    low: int
    ranks: DataRanks
    mesh: ParallelMesh | None
    reduced: torch.Tensor | None = None
    dropped: set[int] = field(default_factory=set)
    absent: set[int] | None = None
    ready: set[nn.Module] = field(default_factory=set)
    collected: bool = False
    pending: bool = False
    gathering: CommHandle | None = None
    versions: list[int] = field(default_factory=list)
    lent: set[int] = field(default_factory=set)
    halves: Halves | None = None

    def __post_init__(self) -> None:
        self.reducible = Reducible(self.buffer, self.spec, self.ranks, self._add_reduced)

    def _add_reduced(self, shard: torch.Tensor) -> None:
        self.pending, self.absent = False, None
        held = self.reduced if self.flat.grad is None else self.flat.grad
        self.flat.grad = None
        if held is None:
            self.reduced = shard
            return
        self.reduced = held
        self.clear_dropped()
        self.reduced = held.to(shard.dtype).add_(shard)

    def settle(self, absent: set[int]) -> None:
        """The gradient of the coming step is complete; `absent` have none."""
        assert self.reduced is not None
        self.clear_dropped()
        if (
            self.flat.grad is None
        ):  # else nothing has come since it was settled last, but it may have been clipped
            self.flat.grad = self.reduced.to(self.flat.dtype)
        self.absent = absent

    def clear_dropped(self) -> None:
        """What has been dropped counts no more, in what is added up and in norms."""
        for held in (self.reduced, self.flat.grad):
            for i in self.dropped if held is not None else ():
                self.of(i, held).zero_()
        self.dropped.clear()

    def drop(self, index: int) -> None:
        """Forget the gradient of one parameter, reduced or not."""
        self.buffer.drop(index)
        if self.reduced is not None:
            self.dropped.add(index)
        if self.absent is not None:
            self.absent.add(index)

    def put(self, index: int, part: torch.Tensor) -> None:
        """Take another part for the reduced gradient of one parameter."""
        assert self.flat.grad is not None and self.absent is not None
        held = self.of(index, self.flat.grad)
        if held.data_ptr() != part.data_ptr():
            held.copy_(part)
        self.dropped.discard(index)
        self.absent.discard(index)

    def forget(self) -> None:
        """Drop every gradient, reduced or not."""
        self.flat.grad = self.reduced = self.absent = None
        self.pending = False
        self.dropped.clear()
        self.buffer.close()
        self.buffer.arrived.clear()
        for param in self.params:
            set_raw_grad(param, None)

    def of(self, index: int, flat: torch.Tensor) -> torch.Tensor:
        """One parameter's part of a tensor laid out as `flat`."""
        start, stop = self.ranges[index]
        return flat[start:stop]

    @cached_property
    def ranges(self) -> list[tuple[int, int]]:
        """(start, stop) in `flat` of every parameter's part."""
        slices = record_of(self.flat).slices or ()
        return [(part.start, part.stop) for part in slices]

    @cached_property
    def places(self) -> list[Place]:
        """Where this rank's part of each parameter's gradient lies in what users see of it."""
        slices = record_of(self.flat).slices or ()
        return [self._place(param, part) for param, part in zip(self.params, slices, strict=True)]

    def _place(self, param: nn.Parameter, part: Slice) -> Place:
        sums, known = groups_along(self.mesh, part.axes)
        shape, shard = torch.Size(param.shape), self.ranks.shard
        return Place(shape, *part.range, shard, sums, beyond=not known, axes=part.axes, owner=part.owner)

    def wait_gathered(self) -> None:
        """Return once the parameters are those of the last step."""
        if self.gathering is not None:
            self.gathering.wait()
            self.gathering = None

    def gathered(self) -> None:
        """Parameters are, or will be, those of `flat`: writes count from now on."""
        self.versions = [param._version for param in self.params]
        self.lent.clear()

    def join(self) -> None:
        """Have the master weights in `flat`. Raises `PlanError` where one that is in halves has been written to."""
        if self.halves is not None and not self.halves.joined:
            self._check_unwritten()
            self.halves.join()

    def split(self) -> None:
        """Have them in halves, where they are kept so: the upper ones are this rank's part of the parameters.

        Not while parameters may have been written to, which `take_writes` has to look at.
        """
        halves = self.halves
        if halves is not None and halves.joined and not self.lent and not self._written():
            halves.split()

    def _written(self) -> list[str]:
        """Names of the parameters that have been changed in place since the last gather."""
        if not self.versions:
            return []
        known = zip(self.chunk.names, self.params, self.versions, strict=True)
        return [name for name, param, before in known if param._version != before]

    def _check_unwritten(self) -> None:
        written = self._written()
        if written:
            raise PlanError(
                "a parameter was changed in place, which split_master cannot follow",
                got=written[0],
                cause="only the other half of its master weights is kept, which does not tell what has changed",
                fix="change it through param.data, load weights by model.load_state_dict or into "
                'optimizer.weights(), or leave split_master out (`cai train`: precision.master = "whole")',
            )

    def take_writes(self) -> None:
        """Let master weights take what somebody has written to the parameters since, element by element.

        What was not written keeps its precision. Nothing waits for the device. Raises as `join` does.
        """
        if self.halves is not None and not self.halves.joined:
            self._check_unwritten()
            return
        if not self.has_master or not self.versions:
            return
        for i, param in enumerate(self.params):
            if param._version != self.versions[i] or i in self.lent:
                master, seen = self.of(i, self.flat.detach()), self.of(i, self.shard)
                written = seen != self._rounded(master, seen)
                master.copy_(torch.where(written, seen.to(master.dtype), master))
        self.gathered()

    def _rounded(self, master: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """What parameters are of master weights."""
        if self.halves is None:
            return master.to(like.dtype)
        rounded = torch.empty_like(like)
        split(master, rounded)
        return rounded

    @property
    def shard(self) -> torch.Tensor:
        """This rank's shard of `weights`."""
        return self.weights[self.low : self.low + self.chunk.shard_numel]

    def to_gather(self) -> torch.Tensor:
        """[shard] of what the parameters of all ranks will be from now on: `flat`, or the upper halves of it.

        On the stream that `flat` is used on: splitting frees its memory.
        """
        self.gathered()
        if self.halves is None:
            return self.flat
        self.halves.split()
        return self.shard

    @property
    def has_master(self) -> bool:
        """Whether `flat` is a copy, in another dtype or not rounded, and not a view of `weights`."""
        return self.halves is not None or self.flat.data_ptr() != self.shard.data_ptr()

    def boxed(self, flat: torch.Tensor) -> dict[str, BoxedTensor]:
        """Boxes, by canonical name, of a tensor laid out as `flat`; the pieces are views."""
        return {name: self.owned(value) for name, value in self.chunk.boxed(flat, self.low).items()}

    @cached_property
    def master_boxes(self) -> dict[str, BoxedTensor]:
        """Boxes of `flat` by name, made while the numbers are there; views that see them whenever they are."""
        return self.boxed(self.flat.detach())

    @cached_property
    def master_shapes(self) -> dict[str, BoxedTensor]:
        """The same on the meta device."""
        return self.boxed(torch.empty(self.flat.shape, dtype=self.flat.dtype, device="meta"))

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
    weights = chunk.allocate(compute, tensors[0].device)
    low, high = chunk.shard_range(ranks.index)
    shard = weights[low:high]
    chunk.fill(weights, tensors)
    if master != compute or apart:
        full = chunk.allocate(master, tensors[0].device)
        chunk.fill(full, tensors)
        shard = full[low:high].clone()
        if precision.split_master:
            split(full, weights)  # rounded as its shards will be
        del full
    flat = nn.Parameter(shard)
    slices = _slices(chunk, low, high, spec, frozenset(ranks.shard_axes))
    attach(flat, slices=slices)
    pieces = [_piece(shard, part) for part in slices]
    for param, view in zip(tensors, chunk.views(weights), strict=True):
        param.data = view
    buffer = GradBuffer(chunk, tensors, reduce, weights.device, before_open=before_open)
    built = Chunk(group, spec, tensors, chunk, weights, flat, pieces, buffer, units, low, ranks, table.mesh)
    if precision.split_master:
        built.halves = Halves(flat, built.ranges, built.shard)
        built.split()
    return built


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
    return sorted(free, key=lambda chunk: -min(position[unit] for unit in chunk.units))


def _buckets(groups: Groups, units: Units):
    """(param group, reduce spec, [(name, parameter)], units) of every chunk, in the order of the units."""
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
