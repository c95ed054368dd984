"""Stages 0, 1 and 2: an ordinary optimizer over flat shards of the parameters.

Stage 0 reduces gradients and steps everywhere. Stage 1 gives every rank the optimizer state, master weights and
step of its shards; stage 2 also keeps only the gradients of its shards (ZeRO, Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh, PeerGather, PeerReduce, Peers, SideStream, check_device
from cai_mesh.errors import PlanError
from cai_mesh.gradients import clip_grad_norm_, direct_linears, grad_norm
from cai_mesh.layout import BoxedTensor, moved, reduce_of, refresh, sites
from cai_mesh.storage import ModuleLifecycle
from cai_zero.chunks import Chunk, build_chunks, optimizer_units, reduction_order
from cai_zero.compress import Compression, check_ranks, gather_weights
from cai_zero.precision import MixedPrecision
from cai_zero.ranks import RankTable
from cai_zero.reducer import GradReducer
from cai_zero.state import own_boxes, restore_groups, saved_groups, state_slots
from cai_zero.unused import Unused, kept


class ShardedOptimizer(torch.optim.Optimizer):
    """What `shard_optimizer` returns: steps flat shards, then gives every rank the unsharded parameters again.

    It is a `GradSync`: backwards under `defer()` only accumulate. Learning-rate schedulers, `param_groups` and
    `zero_grad` work as on the optimizer it was made from. Gradients live in the chunks: `param.grad` is None after
    a backward.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        mesh: AnyMesh | None,
        model: nn.Module | None,
        stage: int,
        precision: MixedPrecision,
        overlap_gather: bool = False,
        compression: Compression | None = None,
        copy_engines: bool = False,
    ):
        self.inner, self.stage, self._overlap = inner, stage, overlap_gather
        self._compression = compression or Compression()
        self.defaults = inner.defaults
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        self._patch_step_function()
        units = optimizer_units(inner, model)
        device = next(iter(units.values()))[0][1].device
        check_device(device, wanted=copy_engines)
        specs = {reduce_of(p) for params in units.values() for _, p in params}
        self._ranks = RankTable(mesh, specs, sharded=stage > 0)
        check_ranks(compression, self._ranks.of(), stage, copy_engines=copy_engines)
        self._gathers = SideStream(device)
        self._reducer: GradReducer[Chunk] = GradReducer(device, self._compression)
        apart = self._compression.weights is not None
        self._chunks = build_chunks(
            inner, units, self._ranks, precision, self._reducer.make_room, apart=apart
        )
        self._chunks_of = {unit: [c for c in self._chunks if unit in c.units] for unit in units}
        self._peers = self._use_copy_engines(device, wanted=copy_engines)
        self._unused = Unused([chunk.buffer for chunk in self._chunks], self._ranks.of())
        order = reduction_order(self._chunks, units, model)
        self._reducer.take({chunk: [chunk.reducible] for chunk in self._chunks}, order)
        for index, group in enumerate(inner.param_groups):
            group["params"] = [c.flat for c in self._chunks if c.group == index]
        if apart:
            self.publish()  # parameters are the rounded ones from the beginning, as in stage 3
        names = {p: name for c in self._chunks for p, name in zip(c.params, c.chunk.names, strict=True)}
        found = sites(model) if model is not None else ()
        self._sites = [(m._parameters, key, p, names[p]) for m, key, p in found if p in names]
        self._lifecycle: ModuleLifecycle | None = None
        if model is not None:
            held = {unit: [p for _, p in params] for unit, params in units.items()}
            self._lifecycle = ModuleLifecycle(held)
            self._lifecycle.listen(self)
            direct_linears(model, (p for c in self._chunks for p in c.params))
            model.register_state_dict_pre_hook(lambda *_: self.wait_gathered())

    def _use_copy_engines(self, device: torch.device, *, wanted: bool) -> Peers[PeerGather]:
        def shard_bytes(chunk: Chunk, like: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
            return chunk.ranks.shard, chunk.chunk.shard_numel * like.element_size()

        reduced = (shard_bytes(c, c.buffer.tensor) for c in self._chunks)
        reduces = Peers(PeerReduce, reduced, device, wanted=wanted and self._compression.gradients is None)
        for chunk in self._chunks:
            chunk.reducible.peer = reduces.of(chunk.ranks.shard)
        gathered = (shard_bytes(c, c.weights) for c in self._chunks)
        return Peers(PeerGather, gathered, device, wanted=wanted)

    # -- while backward runs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Backwards inside accumulate; the next one outside reduces. Stage 2 reduces all the same, into its shards."""
        with self.no_sync() if self.stage < 2 else contextlib.nullcontext():
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate unsharded gradients and communicate none, in every stage."""
        return self._reducer.no_sync()

    def _check_parameters(self) -> None:
        """Raise `LayoutError` where a parameter has been moved out of its chunk, or replaced in the model."""
        for params, key, param, name in self._sites:
            if params.get(key) is not param:
                raise moved(name)
        for chunk in self._chunks:
            chunk.chunk.check_views(chunk.weights, chunk.params)

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        """Parameters are unsharded in stages 0 to 2, once the gather after the last step has arrived."""
        if not backward:
            self._end_pass()  # an earlier backward may have raised
        for chunk in self._chunks_of[unit]:
            chunk.wait_gathered()

    def after_use(self, unit: nn.Module) -> None:
        """Parameters stay unsharded in stages 0 to 2."""

    def grads_ready(self, unit: nn.Module) -> None:
        for chunk in self._chunks_of[unit]:
            chunk.ready.add(unit)
            if chunk.ready == chunk.units:
                self._collect(chunk)

    def backward_done(self) -> None:
        for chunk in self._chunks:
            if not chunk.collected and chunk.buffer.has_gradients:
                chunk.buffer.take()
        self._reducer.end_backward()
        for chunk in self._chunks:
            if self._reducer.silent or chunk.reducible.tied:
                chunk.pending, chunk.flat.grad = True, None
        self._end_pass()

    def before_copy(self) -> None:
        """Parameters hold their values once they are gathered."""
        self.wait_gathered()

    def _end_pass(self) -> None:
        for chunk in self._chunks:
            chunk.collected = False
            chunk.ready.clear()
        self._reducer.reset()

    def _collect(self, chunk: Chunk) -> None:
        chunk.buffer.take()
        chunk.collected = True
        self._reducer.ready(chunk)

    def finish(self) -> None:
        """Reduce what is pending (a last backward under `defer`, tied parameters, a loop without a model) and wait."""
        for chunk in self._chunks:
            if chunk.pending or chunk.reduced is None or chunk.buffer.has_gradients:
                self._reducer.reduce_one(chunk.reducible)
        self._end_pass()
        for chunk in self._chunks:
            assert chunk.reduced is not None
            chunk.flat.grad = chunk.reduced.to(chunk.flat.dtype)
        self._unused.agree()

    # -- the step ------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over the whole model on the whole mesh; returns it. Waits for pending reductions."""
        self._ensure_gradients()
        return clip_grad_norm_([c.flat for c in self._chunks], max_norm, self._ranks.mesh)

    def grad_norm(self) -> torch.Tensor:
        """The norm of `clip_grad_norm_`, with the gradients left as they are."""
        self._ensure_gradients()
        return grad_norm([c.flat for c in self._chunks], self._ranks.mesh)

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the coming step. Waits for pending reductions."""
        self._ensure_gradients()
        torch._foreach_mul_([c.flat.grad for c in self._chunks], factor)

    def _ensure_gradients(self) -> None:
        late = self._lifecycle is None and any(p.grad is not None for c in self._chunks for p in c.params)
        if late or any(c.flat.grad is None for c in self._chunks):
            self.finish()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step this rank's shards, then gather the new parameters. Frees the gradients."""
        if closure is not None:
            raise PlanError("a sharded optimizer takes no closure", fix="run the backward before step()")
        self._check_parameters()
        self._ensure_gradients()
        self.wait_gathered()
        with kept(self._chunks, self._unused.places):
            self.inner.step()
        self._gather()
        if not self._overlap:
            self.wait_gathered()
        self.zero_grad()

    @torch.no_grad()
    def publish(self) -> None:
        """Give every rank the unsharded parameters of what the optimizer holds, after loading weights into it."""
        self._gather()
        self.wait_gathered()

    def _gather(self) -> None:
        """Start gathering the new parameters, in the order of their use."""
        for chunk in [*(c for c in self._chunks if c.reducible.tied), *reversed(self._reducer.order)]:
            with self._gathers.after_compute():
                asynchronous, group = self._gathers.stream is None, chunk.ranks.shard
                done = gather_weights(
                    self._compression,
                    chunk.weights,
                    chunk.flat,
                    group,
                    async_op=asynchronous,
                    peer=self._peers.of(group),
                )
            chunk.gathering = self._gathers.mark() if self._gathers.stream is not None else done

    def wait_gathered(self) -> None:
        """Return once parameters are unsharded again. Only `overlap_gather` leaves that to their first use."""
        for chunk in self._chunks:
            chunk.wait_gathered()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, reduced or not."""
        self._end_pass()
        for chunk in self._chunks:
            chunk.flat.grad = chunk.reduced = None
            chunk.pending = False
            chunk.buffer.close()
            for param in chunk.params:
                param.grad = None

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> ParallelMesh | None:
        """The mesh its parameters are sharded over."""
        return self._ranks.mesh

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
        return {
            name: boxed
            for chunk in self._chunks
            if chunk.flat.grad is not None
            for name, boxed in chunk.boxed(chunk.flat.grad).items()
        }

    def weights(self) -> dict[str, BoxedTensor]:
        """This rank's shards of the (master) weights by canonical name, as views: call `publish` after loading."""
        return {n: b for chunk in self._chunks for n, b in chunk.boxed(chunk.flat.detach()).items()}

    def state_for_checkpoint(self) -> dict[str, BoxedTensor | list]:
        """This rank's shards of the state (`NAME.SLOT`) and `param_groups`, for `cai_mesh.checkpoint`.

        Tensors are views: loading fills the optimizer in place. Call `restore_groups` with the loaded `param_groups`.
        """
        found: dict[str, BoxedTensor | list] = {"param_groups": saved_groups(self.inner)}
        for chunk in self._chunks:
            own = own_boxes(self.inner, chunk.flat)
            if own is not None:
                found.update(own)
                continue
            for slot, tensor in state_slots(self.inner, chunk.flat).items():
                if tensor.shape == chunk.flat.shape:
                    boxes = chunk.boxed(tensor)
                else:
                    boxes = dict.fromkeys(chunk.chunk.names, chunk.owned(BoxedTensor.from_param(tensor)))
                found.update({f"{name}.{slot}": value for name, value in boxes.items()})
        return found

    def restore_groups(self, groups: list) -> None:
        """Take over the hyperparameters of saved `param_groups`. Residuals of compression start from zero."""
        restore_groups(self.inner, groups)
        for chunk in self._chunks:
            chunk.reducible.residual = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's inner state, master weights and residuals, for a resume on the same ranks.

        Unsharded parameters are the model's. `state_for_checkpoint` is the one that reshards.
        """
        master = [chunk.flat.detach() if chunk.has_master else None for chunk in self._chunks]
        residual = [chunk.reducible.residual for chunk in self._chunks]
        return {**self.inner.state_dict(), "master": master, "residual": residual}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on the same rank of the same mesh. Collective where there are master weights."""
        own = ("master", "residual")
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k not in own})
        for chunk, residual in zip(self._chunks, state_dict["residual"], strict=True):
            kept = residual if residual is None else residual.to(chunk.weights.device, copy=True)
            chunk.reducible.residual = kept
        for chunk, master in zip(self._chunks, state_dict["master"], strict=True):
            if master is not None:
                chunk.flat.copy_(master)
        if any(chunk.has_master for chunk in self._chunks):
            self.publish()


def shard_optimizer(
    optimizer: torch.optim.Optimizer,
    mesh: AnyMesh | None,
    *,
    model: nn.Module | None = None,
    stage: int = 1,
    precision: MixedPrecision | None = None,
    overlap_gather: bool = False,
    compression: Compression | None = None,
    copy_engines: bool = False,
) -> ShardedOptimizer:
    """Shard an elementwise optimizer, and with stage 2 the gradients, over the data ranks of a mesh.

    Args:
        optimizer: any torch optimizer that treats elements independently (SGD, Adam, AdamW, RMSprop ...), or one of
            `cai_zero.optimizers`, before its first step and so without state. Its param groups are kept; its
            parameters move into contiguous chunks.
        mesh: see `cai_zero.ranks.RankTable` for how its data axes are found. None: one process.
        model: the module that owns the parameters; gradients are then reduced while backward runs. Stage 1 works
            without it and reduces `param.grad` in `step`.
        stage: 0 (reduce gradients, as DDP), 1 (shard optimizer state and master weights), 2 (also gradients).
        precision: dtypes. With `compute=torch.bfloat16` all parameters, frozen ones too, become bfloat16 and the
            optimizer steps float32 master weights. Buffers are left as they are.
        overlap_gather: gather the new parameters while the next forward runs, each awaited by the block that uses it.
            What reads parameters between `step` and that forward must call `wait_gathered` first (`state_dict` does).
        compression: what travels in one byte an element, in stages 1 and 2. With compressed weights the model's
            parameters are the rounded ones from the beginning, and the optimizer steps master weights apart from them.
        copy_engines: gather and reduce by copies between the GPUs of one host, not by kernels on multiprocessors.

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
    if overlap_gather and model is None:
        raise PlanError("overlap_gather needs the model whose forward it overlaps with", fix="pass model=...")
    if model is not None:
        refresh(model)
    precision = precision or MixedPrecision()
    sharded = ShardedOptimizer(
        optimizer, mesh, model, stage, precision, overlap_gather, compression, copy_engines
    )
    if model is not None and precision.compute is not None:
        for param in model.parameters():
            if not param.requires_grad and param.is_floating_point():
                param.data = param.data.to(precision.compute)
    return sharded
