"""Stages 0, 1 and 2: an ordinary optimizer over flat shards of the parameters.

Stage 0 reduces gradients and steps everywhere. Stage 1 gives every rank the optimizer state, master weights and
step of its rows; stage 2 also keeps only the gradients of its rows (ZeRO, Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.boxed import BoxedTensor
from cai_mesh.collectives import all_gather_into
from cai_mesh.errors import PlanError
from cai_mesh.flat import FlatChunk
from cai_mesh.layout import canonical_name
from cai_mesh.lifecycle import ModuleLifecycle
from cai_mesh.norm import Span, attach_spans, clip_grad_norm_
from cai_mesh.reduce import ReduceSpec
from cai_mesh.units import blocks, check_parameters, gather_gradients
from cai_zero.gradients import ReduceStream, reduce_chunk
from cai_zero.precision import MixedPrecision
from cai_zero.ranks import DataRanks, data_ranks
from cai_zero.state import restore_groups, saved_groups, state_slots

BUCKET_ELEMENTS = 32 * 1024 * 1024
"""Consecutive blocks share a chunk until it has this many elements."""


@dataclass
class _Chunk:
    """One chunk of parameters and what belongs to it."""

    group: int
    spec: ReduceSpec
    params: list[nn.Parameter]
    chunk: FlatChunk
    weights: torch.Tensor
    flat: nn.Parameter
    units: set[nn.Module] = field(default_factory=set)
    gradients: torch.Tensor | None = None
    reduced: torch.Tensor | None = None
    ready: set[nn.Module] = field(default_factory=set)
    fresh: bool = True
    reduced_in_pass: bool = False


class ShardedOptimizer(torch.optim.Optimizer):
    """What `shard_optimizer` returns: steps flat shards, then gives every rank the whole parameters again.

    It is a `GradSync`: backwards under `defer()` only accumulate. Learning-rate schedulers, `param_groups` and
    `zero_grad` work as on the optimizer it was made from. Gradients live in the chunks: `param.grad` is None after
    a backward.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        ranks: DataRanks,
        model: nn.Module | None,
        stage: int,
        precision: MixedPrecision,
    ):
        self.inner, self.stage, self._ranks = inner, stage, ranks
        self._deferring = False
        self._chunks: list[_Chunk] = []
        self.defaults = inner.defaults
        units = _units(inner, model)
        device = next(iter(units.values()))[0][1].device
        self._stream = ReduceStream(device)
        for bucket in _buckets(inner, units):
            self._chunks.append(self._build(*bucket, precision))
        for index, group in enumerate(inner.param_groups):
            group["params"] = [c.flat for c in self._chunks if c.group == index]
        self._lifecycle: ModuleLifecycle | None = None
        if model is not None:
            self._lifecycle = ModuleLifecycle(
                {unit: [p for _, p in params] for unit, params in units.items()}
            )
            self._lifecycle.listen(self)

    def _build(
        self,
        group: int,
        spec: ReduceSpec,
        params: list[tuple[str, nn.Parameter]],
        units: set[nn.Module],
        precision: MixedPrecision,
    ) -> _Chunk:
        chunk = FlatChunk(params, world=self._ranks.size)
        tensors = [param for _, param in params]
        compute, master, self._reduce_dtype = precision.resolve(tensors[0].dtype)
        weights = chunk.allocate(compute, tensors[0].device)
        low, high = chunk.shard_range(self._ranks.index)
        shard = weights[low:high]
        if master != compute:
            full = chunk.allocate(master, tensors[0].device)
            chunk.fill(full, tensors)
            shard = full[low:high].clone()
            del full
        chunk.fill(weights, tensors)
        flat = nn.Parameter(shard)
        attach_spans(flat, _spans(chunk, low, high, spec, frozenset(self._ranks.shard_axes)))
        for param, view in zip(tensors, chunk.views(weights), strict=True):
            param.data = view
        return _Chunk(group, spec, tensors, chunk, weights, flat, units)

    # -- while backward runs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Backwards inside accumulate; the next one outside reduces. Stage 2 reduces all the same, into its rows."""
        before, self._deferring = self._deferring, True
        try:
            yield
        finally:
            self._deferring = before

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        """Parameters are always whole in stages 0 to 2."""

    def after_use(self, unit: nn.Module) -> None:
        """Parameters are always whole in stages 0 to 2."""

    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self._chunks:
            if unit in chunk.units:
                chunk.ready.add(unit)
                if chunk.ready == chunk.units:
                    self._collect(chunk)

    def backward_done(self) -> None:
        for chunk in self._chunks:
            if any(p.grad is not None for p in chunk.params):
                self._collect(chunk)
            if self._reduces_now(chunk) and not chunk.reduced_in_pass:
                self._reduce(chunk)  # other ranks may have used what this one did not
            chunk.reduced_in_pass = False
            chunk.ready.clear()
        self._stream.join()

    def _reduces_now(self, chunk: _Chunk) -> bool:
        """Tied parameters wait for `finish`: their other holder is in another pipeline stage, perhaps still behind."""
        return chunk.spec.tied is None and (self.stage == 2 or not self._deferring)

    @torch.no_grad()
    def _collect(self, chunk: _Chunk) -> None:
        if chunk.gradients is None:
            chunk.gradients = chunk.chunk.allocate(self._reduce_dtype, chunk.weights.device)
            chunk.fresh = True
        gather_gradients(chunk.params, chunk.chunk.views(chunk.gradients), fresh=chunk.fresh)
        chunk.fresh = False
        chunk.ready.clear()
        if self._reduces_now(chunk):
            self._reduce(chunk)

    @torch.no_grad()
    def _reduce(self, chunk: _Chunk) -> None:
        """Reduce what has accumulated in the chunk and add it to this rank's rows."""
        full, chunk.gradients, chunk.flat.grad = chunk.gradients, None, None
        if full is None:
            full = chunk.chunk.allocate(self._reduce_dtype, chunk.weights.device, zero=True)
        chunk.reduced_in_pass = True
        with self._stream.after_compute(full):
            shard = reduce_chunk(full, self._ranks, chunk.spec)
            chunk.reduced = shard if chunk.reduced is None else chunk.reduced.add_(shard)

    def finish(self) -> None:
        """Reduce what is pending (a last backward under `defer`, tied parameters, a loop without a model) and wait."""
        for chunk in self._chunks:
            if any(p.grad is not None for p in chunk.params):
                self._collect(chunk)
            if chunk.gradients is not None or chunk.reduced is None:
                self._reduce(chunk)
            chunk.reduced_in_pass = False
        self._stream.join()
        for chunk in self._chunks:
            assert chunk.reduced is not None
            chunk.flat.grad = chunk.reduced.to(chunk.flat.dtype)

    # -- the step ------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over the whole model on the whole mesh; returns it. Waits for pending reductions."""
        self._ensure_gradients()
        return clip_grad_norm_([c.flat for c in self._chunks], max_norm, self._ranks.mesh)

    def _ensure_gradients(self) -> None:
        if any(c.flat.grad is None for c in self._chunks):
            self.finish()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step this rank's rows, then gather the new parameters. Frees the gradients."""
        if closure is not None:
            raise PlanError("a sharded optimizer takes no closure", fix="run the backward before step()")
        self._ensure_gradients()
        self.inner.step()
        self.publish()
        self.zero_grad()

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the whole parameters of what the optimizer holds; after a step, or after loading weights."""
        for chunk in self._chunks:
            low, high = chunk.chunk.shard_range(self._ranks.index)
            rows = chunk.weights[low:high]
            if chunk.flat.data_ptr() != rows.data_ptr():
                rows.copy_(chunk.flat)
            all_gather_into(chunk.weights, rows, self._ranks.shard)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, reduced or not."""
        for chunk in self._chunks:
            chunk.flat.grad = chunk.gradients = chunk.reduced = None
            chunk.fresh = True
            chunk.ready.clear()
            for param in chunk.params:
                param.grad = None

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer, over flat shards."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer, by flat shard."""
        return self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise PlanError(
            "a sharded optimizer cannot take more parameters", fix="build it anew with all of them"
        )

    def gradients(self) -> dict[str, BoxedTensor]:
        """This rank's reduced gradients by canonical parameter name. Waits for pending reductions."""
        self._ensure_gradients()
        return self._boxed(lambda chunk: chunk.flat.grad)

    def weights(self) -> dict[str, BoxedTensor]:
        """This rank's rows of the (master) weights by canonical name, as views: call `publish` after loading."""
        return self._boxed(lambda chunk: chunk.flat.detach())

    def state_for_checkpoint(self) -> dict[str, BoxedTensor | list]:
        """This rank's rows of the state (`NAME.SLOT`) and `param_groups`, for `cai_mesh.checkpoint`.

        Tensors are views: loading fills the optimizer in place. Call `restore_groups` with the loaded `param_groups`.
        """
        found: dict[str, BoxedTensor | list] = {"param_groups": saved_groups(self.inner)}
        for chunk in self._chunks:
            low, _ = chunk.chunk.shard_range(self._ranks.index)
            for slot, tensor in state_slots(self.inner, chunk.flat).items():
                found.update(self._slot(chunk, slot, tensor, low))
        return found

    def _slot(self, chunk: _Chunk, slot: str, tensor: torch.Tensor, low: int) -> dict[str, BoxedTensor]:
        if tensor.numel() == chunk.flat.numel() and tensor.dim() == 1:
            boxes = chunk.chunk.boxed(tensor, low)
            return {f"{name}.{slot}": _owned(value, chunk) for name, value in boxes.items()}
        return {f"{name}.{slot}": _owned(BoxedTensor.from_param(tensor), chunk) for name in chunk.chunk.names}

    def restore_groups(self, groups: list) -> None:
        """Take over the hyperparameters of saved `param_groups`."""
        restore_groups(self.inner, groups)

    def _boxed(self, pick: Callable[[_Chunk], torch.Tensor]) -> dict[str, BoxedTensor]:
        found: dict[str, BoxedTensor] = {}
        for chunk in self._chunks:
            boxes = chunk.chunk.boxed(pick(chunk), chunk.chunk.shard_range(self._ranks.index)[0])
            found.update({name: _owned(value, chunk) for name, value in boxes.items()})
        return found

    def state_dict(self) -> dict[str, Any]:
        """This rank's inner state, for a resume on the same ranks. `state_for_checkpoint` is the one that reshards."""
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on the same rank of the same mesh."""
        self.inner.load_state_dict(state_dict)


def _owned(value: BoxedTensor, chunk: _Chunk) -> BoxedTensor:
    return BoxedTensor(value.global_shape, value.dtype, value.pieces, chunk.spec.owner)


def _units(
    inner: torch.optim.Optimizer, model: nn.Module | None
) -> dict[nn.Module, list[tuple[str, nn.Parameter]]]:
    """The optimizer's parameters by unit, with names; one unit of unnamed parameters where there is no model."""
    held = [param for group in inner.param_groups for param in group["params"]]
    if inner.state:
        raise PlanError("the optimizer has already stepped", fix="shard it before its first step")
    if len({id(p) for p in held}) != len(held):
        raise PlanError("a parameter is in the optimizer twice", fix="give every parameter to one group")
    if model is None:
        units = {nn.Module(): [(f"param.{i}", p) for i, p in enumerate(held) if p.requires_grad]}
    else:
        _check_owned(held, model)
        wanted = {id(p) for p in held if p.requires_grad}
        units = {m: [(n, p) for n, p in params if id(p) in wanted] for m, params in blocks(model).items()}
        units = {m: params for m, params in units.items() if params}
    if not any(units.values()):
        raise PlanError("the optimizer has no trainable parameter")
    check_parameters(pair for params in units.values() for pair in params)
    return units


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


def _buckets(inner: torch.optim.Optimizer, units: dict[nn.Module, list[tuple[str, nn.Parameter]]]):
    """(param group, reduce spec, [(name, parameter)], units) of every chunk, in the order of the units."""
    groups = {id(p): i for i, group in enumerate(inner.param_groups) for p in group["params"]}
    open_buckets: dict[tuple, tuple[int, ReduceSpec, list, set]] = {}
    done = []
    for unit, params in units.items():
        for name, param in params:
            spec = ReduceSpec.of(param)
            key = (groups[id(param)], param.dtype, param.device, spec)
            _, _, held, members = open_buckets.setdefault(key, (key[0], spec, [], set()))
            held.append((canonical_name(name, param), param))
            members.add(unit)
        for key in [k for k, b in open_buckets.items() if sum(p.numel() for _, p in b[2]) >= BUCKET_ELEMENTS]:
            done.append(open_buckets.pop(key))
    return done + list(open_buckets.values())


def _spans(chunk: FlatChunk, low: int, high: int, spec: ReduceSpec, shard_axes: frozenset[str]) -> list[Span]:
    spans: list[Span] = []
    for part in chunk.overlaps(low, high):
        axes, stop = part.slot.layout.sharded_axes | shard_axes, part.start + part.high - part.low
        if spans and spans[-1].axes == axes:
            spans[-1] = Span(spans[-1].start, stop, axes, spec.owner)
        else:
            spans.append(Span(part.start, stop, axes, spec.owner))
    return spans


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    mesh: DeviceMesh | None,
    *,
    model: nn.Module | None = None,
    stage: int = 1,
    precision: MixedPrecision | None = None,
) -> ShardedOptimizer:
    """Shard an elementwise optimizer, and with stage 2 the gradients, over the data ranks of a mesh.

    Args:
        optimizer: any torch optimizer that treats elements independently (SGD, Adam, AdamW, RMSprop, Adagrad ...),
            before its first step. Its param groups are kept; its parameters move into contiguous chunks.
        mesh: see `cai_zero.ranks.data_ranks` for how its data axes are found. None: one process.
        model: the module that owns the parameters; gradients are then reduced while backward runs. Stage 1 works
            without it and reduces `param.grad` in `step`.
        stage: 0 (reduce gradients, as DDP), 1 (shard optimizer state and master weights), 2 (also gradients).
        precision: dtypes. With `compute=torch.bfloat16` all parameters, frozen ones too, become bfloat16 and the
            optimizer steps float32 master weights. Buffers are left as they are.

    Raises `PlanError` when the optimizer's parameters are not the model's, appear twice, or cannot be sharded.
    """
    if stage not in (0, 1, 2):
        raise PlanError(
            "unknown ZeRO stage for an optimizer",
            got=stage,
            expected="0, 1 or 2",
            fix="stage 3 is shard_module",
        )
    if model is None and stage != 1:
        raise PlanError(
            f"stage {stage} reduces gradients during backward and needs the model", fix="pass model=..."
        )
    ranks, precision = data_ranks(mesh, sharded=stage > 0), precision or MixedPrecision()
    sharded = ShardedOptimizer(optimizer, ranks, model, stage, precision)
    if model is not None and precision.compute is not None:
        for param in model.parameters():
            if not param.requires_grad and param.is_floating_point():
                param.data = param.data.to(precision.compute)
    return sharded
