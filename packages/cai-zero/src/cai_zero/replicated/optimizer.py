"""Stages 0, 1 and 2: an ordinary optimizer over flat shards of the parameters.

Stage 0 reduces gradients and steps everywhere. Stage 1 gives every rank the optimizer state, master weights and
step of its shards; stage 2 also keeps only the gradients of its shards (ZeRO, Rajbhandari et al., arXiv:1910.02054).
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, ParallelMesh, PeerGather, PeerReduce, Peers, SideStream, check_device
from cai_mesh.errors import PlanError
from cai_mesh.gradients import (
    GradBuffer,
    ShownParameter,
    clip_grad_norm_,
    direct_linears,
    grad_norm,
    plain,
)
from cai_mesh.layout import (
    SIGNATURE,
    BoxedTensor,
    check_signature,
    moved,
    reduce_of,
    signature_of,
    sites,
)
from cai_mesh.storage import LifecycleListener, ModuleLifecycle, apart
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.compression import Compression, check_ranks, gather_weights
from cai_zero.reduction.ranks import RankTable
from cai_zero.replicated import masters
from cai_zero.replicated.arriving import arriving
from cai_zero.replicated.chunks import Chunk, Units, build_chunks
from cai_zero.replicated.keepers import ChunkKeeper, show_others
from cai_zero.replicated.max_norm import check_alike, renormed
from cai_zero.replicated.members import Members
from cai_zero.replicated.piece_state import state_of_pieces
from cai_zero.replicated.pieces import PieceKeeper, PieceParameter
from cai_zero.replicated.shown_state import ShownState
from cai_zero.replicated.step_gradients import StepGradients
from cai_zero.state import restore_groups, saved_groups


class ShardedOptimizer(torch.optim.Optimizer, LifecycleListener):
    """The optimizer of `shard_optimizer`: steps flat shards, then gives every rank the unsharded parameters again.

    It is a `GradSync`: backwards under `defer()` only accumulate. Learning-rate schedulers, `param_groups` and
    `zero_grad` work as on the optimizer it was made from; its groups hold this rank's part of each parameter.
    Gradients live in the chunks until `zero_grad` drops them. `param.grad` shows them: reading one reduces what is
    still to be reduced, so all ranks must read alike; writing, replacing and clearing one counts for the coming step.
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
        self._members, self._model, self._precision = Members(inner, model, mesh), model, precision
        device = self._members.device
        check_device(device, wanted=copy_engines)
        specs = {reduce_of(p) for p in self._members.params}
        self._ranks = RankTable(mesh, specs, sharded=stage > 0)
        check_ranks(compression, self._ranks.of(), stage, copy_engines=copy_engines)
        self._gathers, self._renormed = SideStream(device), renormed(model)
        self._gradients = StepGradients(self._ranks, device, self._compression, listens=model is not None)
        self._device, self._copy_engines = device, copy_engines
        self._takes_writes = self._compression.weights is None
        self._chunks: list[Chunk] = []
        self._lifecycle: ModuleLifecycle | None = None
        if model is not None:
            self._lifecycle = ModuleLifecycle({model: []})  # its forward is a pass
            self._lifecycle.listen(self._gradients)
            self._lifecycle.listen(self)
            model.register_state_dict_pre_hook(lambda *_: self.wait_gathered())
            model.register_state_dict_post_hook(lambda *call: self._separate(*call))
            model.register_load_state_dict_pre_hook(lambda *_: self._await_writes())
        self._take(self._members.units())
        show_others(self, self._members.waiting, self._model, self._ranks)

    def admit(self) -> None:
        """Take into chunks what is to be trained and lies in none: unfrozen parameters, those of added groups.

        Collective where there is any; all ranks unfreeze alike.
        """
        units = self._members.units()
        if units:
            self._take(units)

    def _take(self, units: Units) -> None:
        """Take units into chunks; at first there may be none, of a pipeline stage where nothing is trained."""
        new_chunks = build_chunks(
            self._members.groups,
            units,
            self._ranks,
            self._precision,
            self._gradients.make_room,
            apart=not self._takes_writes,
        )
        self._chunks += new_chunks
        self._members.take(new_chunks)
        self._show(new_chunks)
        self._peers = self._use_copy_engines(self._device, enabled=self._copy_engines)
        self._gradients.take(self._chunks, new_chunks, self._members.order, self._model)
        for chunk in new_chunks:
            chunk.weights.gathered()
        if not self._takes_writes:
            self.publish()  # parameters are the rounded ones from the beginning, as in stage 3
        self._watch(new_chunks, units)

    def _watch(self, chunks: Sequence[Chunk], units: Units) -> None:
        """Follow the uses of what has just been taken, and where the model keeps it."""
        names = {p: name for c in self._chunks for p, name in zip(c.params, c.chunk.names, strict=True)}
        places = sites(self._model) if self._model is not None else ()
        self._sites = [(m._parameters, key, p, names[p]) for m, key, p in places if p in names]
        if self._model is not None and self._lifecycle is not None:
            self._lifecycle.watch({unit: [p for _, p in params] for unit, params in units.items()})
            direct_linears(self._model, (p for c in chunks for p in c.params))

    def _separate(self, model: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
        """Give parameters in a state dict a storage each; what is written there counts."""
        for chunk in self._chunks:
            if chunk.weights.has_master:
                chunk.weights.join()
                chunk.weights.lent.update(range(len(chunk.params)))
        apart(state, (prefix + name for name, _ in model.named_parameters(remove_duplicate=False)))

    def _use_copy_engines(self, device: torch.device, *, enabled: bool) -> Peers[PeerGather]:
        def shard_bytes(chunk: Chunk, like: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
            return chunk.ranks.shard, chunk.chunk.shard_numel * like.element_size()

        reduced = (shard_bytes(c, c.gradients.buffer.tensor) for c in self._chunks)
        reduces = Peers(PeerReduce, reduced, device, wanted=enabled and self._compression.gradients is None)
        for chunk in self._chunks:
            chunk.gradients.reducible.peer = reduces.of(chunk.ranks.shard)
        gathered = (shard_bytes(c, c.weights.unsharded) for c in self._chunks)
        return Peers(PeerGather, gathered, device, wanted=enabled)

    def _show(self, chunks: Sequence[Chunk]) -> None:
        """Let parameters and pieces show the gradients of their chunks."""
        for chunk in chunks:
            for i, (param, piece) in enumerate(zip(chunk.params, chunk.weights.pieces, strict=True)):
                ShownParameter.adopt(param, ChunkKeeper(self, chunk), i)
                PieceParameter.adopt(piece, PieceKeeper(self, chunk), i)

    # -- while backward runs -------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Backwards inside accumulate; the next one outside reduces. Stage 2 reduces all the same, into its shards."""
        with self.no_sync() if self.stage < 2 else contextlib.nullcontext():
            yield

    def no_sync(self) -> AbstractContextManager[None]:
        """Backwards inside accumulate unsharded gradients and communicate none, in every stage."""
        return self._gradients.no_sync()

    def _check_parameters(self) -> None:
        """Raise `LayoutError` where a parameter has been moved out of its chunk, or replaced in the model."""
        for params, key, param, name in self._sites:
            if params.get(key) is not param:
                raise moved(name)
        for chunk in self._chunks:
            chunk.chunk.check_views(chunk.weights.unsharded, chunk.params)

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        """Have the parameters once the gather after the last step has arrived, and in chunks what is to be trained."""
        if unit is self._model and not backward:
            self.admit()
            masters.rest(self._chunks)
        for chunk in self._gradients.chunks_of(unit):
            chunk.weights.wait_gathered()

    def _await_writes(self) -> None:
        """Have the parameters, and whole master weights, before a state dict is loaded."""
        self.wait_gathered()
        masters.join(self._chunks)

    def before_copy(self) -> None:
        """Have the parameters' values, which are being gathered perhaps."""
        self.wait_gathered()

    def finish(self) -> None:
        """Reduce what is pending (a last backward under `defer`, tied parameters, a loop without a model) and wait."""
        self._gradients.finish()

    # -- the step ------------------------------------------------------------------------------------------------

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Clip by the norm over the whole model on the whole mesh; returns it. Waits for pending reductions."""
        self.ensure_gradients()
        return clip_grad_norm_([chunk.weights.flat for chunk in self._chunks], max_norm, self._ranks.mesh)

    def grad_norm(self) -> torch.Tensor:
        """The norm of `clip_grad_norm_`, with the gradients left as they are."""
        self.ensure_gradients()
        return grad_norm([chunk.weights.flat for chunk in self._chunks], self._ranks.mesh)

    @torch.no_grad()
    def scale_gradients(self, factor: float) -> None:
        """Multiply the gradients of the coming step. Waits for pending reductions."""
        self.ensure_gradients()
        torch._foreach_mul_([chunk.weights.flat.grad for chunk in self._chunks], factor)

    def ensure_gradients(self) -> None:
        """Return with the gradients of the coming step complete. Collective, unless they are already."""
        self.admit()
        self._gradients.settle()

    def has_gradients(self) -> bool:
        """Whether anything has arrived since the gradients were last dropped, as far as this rank knows."""
        return self._gradients.has_gradients()

    def reopen(self) -> None:
        """Reduce again: a gradient of this rank has been put where autograd accumulates."""
        self._gradients.reopen()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step this rank's shards, then gather the new parameters. Gradients stay until `zero_grad`, as torch's do."""
        if closure is not None:
            raise PlanError("a sharded optimizer takes no closure", fix="run the backward before step()")
        self._check_parameters()
        check_alike(self._renormed, self._ranks.of())
        self.admit()
        self._gradients.settle_for_step()
        self.take_writes()
        with self._gradients_in_pieces():
            masters.step(self.inner, self._chunks)
        self._gather()
        if not self._overlap:
            self.wait_gathered()
            return
        for chunk in self._chunks:
            arriving(chunk.params)

    @contextlib.contextmanager
    def _gradients_in_pieces(self) -> Iterator[None]:
        """Inside, pieces are plain parameters with plain gradients, and none where no rank has one."""
        with plain(self._pieces):
            for chunk in self._chunks:
                for i, piece in enumerate(chunk.weights.pieces):
                    piece.grad = chunk.gradients.part(i)
            try:
                yield
            finally:
                for piece in self._pieces:
                    piece.grad = None

    @property
    def chunks(self) -> Sequence[Chunk]:
        """The chunks there are; `admit` may add some."""
        return self._chunks

    @property
    def buffers(self) -> list[GradBuffer]:
        """The buffers in which gradients of chunks accumulate."""
        return self._gradients.buffers

    @property
    def _pieces(self) -> list[nn.Parameter]:
        return [piece for chunk in self._chunks for piece in chunk.weights.pieces]

    @torch.no_grad()
    def take_writes(self) -> None:
        """Let master weights take what a loop has written to parameters (a clamp, loaded weights); a step does it.

        Compressed weights are rounded ones: there masters alone count.
        """
        self.wait_gathered()
        if self._takes_writes:
            for chunk in self._chunks:
                chunk.weights.take_writes()

    @torch.no_grad()
    def publish(self, only: Chunk | None = None) -> None:
        """Give every rank the unsharded parameters of what the optimizer holds, after loading weights into it."""
        self._gather(only)
        self.wait_gathered()

    def _gather(self, only: Chunk | None = None) -> None:
        """Start gathering the new parameters, in the order of their use."""
        order = [*self._gradients.tied, *reversed(self._gradients.order)]
        for chunk in order if only is None else [only]:
            shard = chunk.weights.to_gather()
            with self._gathers.after_compute():
                asynchronous, group = self._gathers.stream is None, chunk.ranks.shard
                done = gather_weights(
                    self._compression,
                    chunk.weights.unsharded,
                    shard,
                    group,
                    async_op=asynchronous,
                    peer=self._peers.of(group),
                )
            chunk.weights.gathering = self._gathers.mark() if self._gathers.stream is not None else done

    def wait_gathered(self) -> None:
        """Return once parameters are unsharded again. Only `overlap_gather` leaves that to their first use."""
        for chunk in self._chunks:
            chunk.weights.wait_gathered()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient, reduced or not; or let those that there are be zero, which a step decays by."""
        if set_to_none:
            self._gradients.forget()
        else:
            self._gradients.zero()

    # -- what it holds -------------------------------------------------------------------------------------------

    @property
    def mesh(self) -> ParallelMesh | None:
        """The mesh its parameters are sharded over."""
        return self._ranks.mesh

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of the inner optimizer, over this rank's parts of the parameters, each 1-d and perhaps empty."""
        return self.inner.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of the inner optimizer, by this rank's part of each parameter.

        Asked for by a parameter of the model it is shown as gradients are, in the parameter's shape.
        """
        return ShownState(self.inner.state)

    @property
    def member_groups(self) -> list[list[nn.Parameter]]:
        """The parameters of each group as the model has them, frozen ones too."""
        return self._members.by_group

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with options of their own, as torch does. Collective; they move into chunks of their own.

        Raises `PlanError` for parameters that the model does not have or another group has.
        """
        self._members.add(param_group)
        show_others(self, self._members.waiting, self._model, self._ranks)
        self._members.take([])
        self.admit()

    def gradients(self) -> dict[str, BoxedTensor]:
        """This rank's reduced gradients by canonical parameter name. Waits for pending reductions."""
        self.ensure_gradients()
        return {
            name: boxed
            for chunk in self._chunks
            if chunk.weights.flat.grad is not None
            for name, boxed in chunk.boxed(chunk.weights.flat.grad).items()
        }

    def weights(self) -> dict[str, BoxedTensor]:
        """This rank's shards of the (master) weights by canonical name, as views: call `publish` after loading.

        Those in halves (`split_master`) are lent one after the other until the next forward: `BoxedTensor.present`.
        """
        self.take_writes()
        return masters.boxed(self._chunks)

    def state_for_checkpoint(self) -> dict[str, BoxedTensor | list]:
        """This rank's shards of the state (`NAME.SLOT`) and `param_groups`, for `cai_mesh.checkpoint`.

        Tensors are views: loading fills the optimizer in place. Call `restore_groups` with the loaded `param_groups`.
        """
        stateless = [
            chunk for chunk in self._chunks if any(p not in self.inner.state for p in chunk.weights.pieces)
        ]
        with plain(self._pieces), masters.opened(stateless):
            return {"param_groups": saved_groups(self.inner), **state_of_pieces(self.inner, self._chunks)}

    def restore_groups(self, groups: list) -> None:
        """Take over the hyperparameters of saved `param_groups`. Residuals of compression start from zero."""
        restore_groups(self.inner, groups)
        for chunk in self._chunks:
            chunk.gradients.reducible.residual = None

    def state_dict(self) -> dict[str, Any]:
        """This rank's inner state, master weights and residuals, for a resume on the same ranks.

        Unsharded parameters are the model's. `state_for_checkpoint` is the one that reshards.
        """
        self.take_writes()
        residual = [chunk.gradients.reducible.residual for chunk in self._chunks]
        parts = {"master": masters.saved(self._chunks), "residual": residual, SIGNATURE: self._signature()}
        return {**self.inner.state_dict(), **parts}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` gave on the same rank of the same mesh. Collective where there are master weights.

        Raises `CheckpointError` for state of other parts.
        """
        check_signature(
            "the state of an optimizer",
            state_dict.get(SIGNATURE),
            self._signature(),
            "cai_zero.full_optimizer_state_dict and load_full_optimizer_state_dict move state between any ranks, "
            "stages and plain loops, as does cai_mesh.checkpoint with state_for_checkpoint()",
        )
        parts = ("master", "residual", SIGNATURE)
        self.inner.load_state_dict({k: v for k, v in state_dict.items() if k not in parts})
        for chunk, residual in zip(self._chunks, state_dict["residual"], strict=True):
            local_residual = (
                residual if residual is None else residual.to(chunk.weights.unsharded.device, copy=True)
            )
            chunk.gradients.reducible.residual = local_residual
        if masters.load(self._chunks, state_dict["master"]):
            self.publish()

    def _signature(self) -> str:
        """The signature of this rank's pieces, and of the chunks that they lie in."""
        named = (
            (name, piece)
            for c in self._chunks
            for name, piece in zip(c.chunk.names, c.weights.pieces, strict=True)
        )
        return signature_of(named, (chunk.weights.flat.numel() for chunk in self._chunks))
