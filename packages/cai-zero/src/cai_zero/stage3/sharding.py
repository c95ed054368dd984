"""Stage 3: parameters themselves are sharded, and unsharded only while their block is in use.

ZeRO-3 (Rajbhandari et al., arXiv:1910.02054) in the manner of FSDP (Zhao et al., arXiv:2304.11277), on flat chunks:
an all-gather writes the chunk that the block's parameters are views of, a reduce-scatter reads the chunk their
gradients were accumulated in. Nothing is copied on the way.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import nn

from cai_mesh.comm import AnyMesh, PeerGather, PeerReduce, Peers, all_gather_object, check_device
from cai_mesh.errors import PlanError
from cai_mesh.gradients import (
    GradBuffer,
    ShardParameter,
    ShownParameter,
    check_no_gradients,
    direct_linears,
    show,
)
from cai_mesh.layout import ReduceSpec, reduce_of
from cai_mesh.protocols import CommHandle, Residency
from cai_mesh.storage import (
    FlatUnit,
    ModuleLifecycle,
    Share,
    StoredShard,
    check_parameters,
    units,
)
from cai_zero.precision import MixedPrecision
from cai_zero.reduction.arrivals import absent
from cai_zero.reduction.compression import Compression, check_ranks
from cai_zero.reduction.ranks import RankTable, second_group
from cai_zero.reduction.reducer import GradReducer, Reducible
from cai_zero.stage3.gathering import Gather, Gatherer, Gathering, Part, Sharded
from cai_zero.stage3.initial_values import Materialize, device_of, fill
from cai_zero.stage3.keeper import ShardKeeper
from cai_zero.stage3.order import complete
from cai_zero.stage3.steps import follow_steps


@dataclass(frozen=True)
class Options:
    """Choices of `shard_module`, described there."""

    precision: MixedPrecision
    residency: Residency
    driver: Literal["hooks", "actions"]
    gather: Gather
    materialize: Materialize | None
    device: torch.device | None
    compression: Compression


class ModuleSharding:
    """Keeps a model's parameters sharded; a `ParameterSharding` and a `GradSync`. Found by `sharding_of(model)`.

    Reductions happen after every backward, into this rank's shards, also under `defer`: unsharded gradients never
    pile up. `no_sync` lets them.
    """

    def __init__(self, model: nn.Module, mesh: AnyMesh | None, options: Options):
        self.driver, self._root, self._options = options.driver, model, options
        model_units = units(model)
        if not any(model_units.values()):
            raise PlanError("the model has no parameters to shard")
        check_parameters((pair for params in model_units.values() for pair in params), meta=True)
        check_no_gradients(p for params in model_units.values() for _, p in params)
        self._device = device_of(
            next(p for params in model_units.values() for _, p in params), options.device
        )
        check_device(self._device, wanted=options.gather.copy_engines)
        self.ranks = RankTable(mesh, {reduce_of(p) for params in model_units.values() for _, p in params})
        check_ranks(options.compression, self.ranks.of(), 3, copy_engines=options.gather.copy_engines)
        self._gather_groups: dict[dist.ProcessGroup | None, dist.ProcessGroup | None] = {}
        self._reducer: GradReducer[Sharded] = GradReducer(self._device, options.compression)
        self._units = {m: Sharded(m, self._chunked(params)) for m, params in model_units.items()}
        root = self._units[model]
        self._reduced: list[Part] = []
        self._agreed, self._open = (
            True,
            False,
        )  # whether ranks know what is absent; whether a backward has begun
        self._parts = [part for unit in self._units.values() for part in unit.parts]
        self._use_copy_engines(self._parts)
        options.residency.adopt([part.stored for part in self._parts], self.ranks.mesh)
        self._gatherer = Gatherer(
            [root, *(u for u in self._units.values() if u is not root)],
            options.residency,
            self._device,
            options=options.gather,
            compression=options.compression,
            passed=self._reducer.ready,
            unexpected=lambda name: self.ranks.turns.take(f"{name} out of its order", together=True),
        )
        self._reducer.order = [*(u for u in reversed(self._units.values()) if u is not root), root]
        self._recorded: tuple[list[Sharded], list[Sharded], list[Sharded]] | None = ([], [], [])
        self._late: list[Sharded] = []  # used after their turn in this backward, as all ranks must have done
        self._pending = False
        self._lifecycle = ModuleLifecycle({}, substitutes=True)
        self._lifecycle.listen(self)
        self._show_frozen()
        self._follow([part for part in self._parts if part.reducible is not None])
        follow_steps(self, {id(p) for part in self._parts for p in part.unit.kept})

    def _show_frozen(self) -> None:
        """Show frozen shards in the shape of the whole parameter, too."""
        for unit in (part.unit for part in self._parts if part.reducible is None):
            keeper = ShardKeeper(self, self.ranks, unit, None)
            for i, shard in enumerate(unit.kept):
                ShardParameter.adopt(shard, keeper, i)
                shard.cai_place = functools.partial(keeper.place, i)  # for a residency

    def _follow(self, parts: Sequence[Part]) -> None:
        """Reduce the gradients of parts that are trained from now on, and show them."""
        for part in parts:
            assert part.reducible is not None
            unit, buffer = part.unit, part.reducible.buffer
            self._reduced.append(part)
            for i, (shard, unsharded) in enumerate(zip(unit.kept, unit.used, strict=True)):
                keeper = ShardKeeper(self, self.ranks, unit, buffer)
                ShardParameter.adopt(shard, keeper, i)
                shard.cai_place = functools.partial(keeper.place, i)  # for a residency
                shard.cai_share = functools.partial(keeper.share_of, i)
                ShownParameter.adopt(unsharded, ShardKeeper(self, self.ranks, unit, buffer, full=True), i)
        reducible = {u: [part.reducible for part in u.parts if part.reducible] for u in self._units.values()}
        self._reducer.take(reducible, self._reducer.order)
        used = {m: [p for part in u.parts for p in part.unit.used] for m, u in self._units.items()}
        self._lifecycle.watch(used)

    def _admit(self) -> None:
        """Train what has been unfrozen since. Collective where there is any; all ranks unfreeze alike."""
        changed = [(part, part.unfrozen) for part in self._parts if part.unfrozen]
        new_parts = [part for part, _ in changed if part.reducible is None]
        for part, indices in changed:
            for i in indices:
                part.unit.used[i].requires_grad_(True)
            part.still = [i for i in part.still if i not in indices]
            if part.reducible is None:
                self._train(part)
                self._options.residency.train(part.stored)
            else:
                part.reducible.buffer.watch()
        if changed:
            self._follow(new_parts)
            self._use_copy_engines(self._parts)

    def _use_copy_engines(self, parts: Sequence[Part]) -> None:
        def shard_bytes(part: Part, like: torch.Tensor) -> tuple[dist.ProcessGroup | None, int]:
            return self.ranks.of(part.spec).shard, (part.unit.high - part.unit.low) * like.element_size()

        enabled = self._options.gather.copy_engines
        trained = [part for part in parts if part.reducible is not None]
        gathered = (shard_bytes(p, p.unit.unsharded) for p in parts)
        reduced = (shard_bytes(p, p.reducible.buffer.tensor) for p in trained)  # type: ignore[union-attr]
        gathers = Peers(PeerGather, gathered, self._device, wanted=enabled)
        reduces = Peers(
            PeerReduce, reduced, self._device, wanted=enabled and self._options.compression.gradients is None
        )
        for part in parts:
            part.peer = gathers.of(self.ranks.of(part.spec).shard)
        for part in trained:
            part.reducible.peer = reduces.of(self.ranks.of(part.spec).shard)  # type: ignore[union-attr]

    def _chunked(self, params: list[tuple[str, nn.Parameter]]) -> list[Part]:
        kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, param in params:
            kinds.setdefault((param.dtype, param.requires_grad, reduce_of(param)), []).append((name, param))
        return [self._part(members, spec) for (_, _, spec), members in kinds.items()]

    def _part(self, members: list[tuple[str, nn.Parameter]], spec: ReduceSpec) -> Part:
        dtype, trained = members[0][1].dtype, members[0][1].requires_grad
        compute, master, _ = self._options.precision.resolve(dtype, trained=trained)
        ranks = self.ranks.of(spec)
        unit = FlatUnit(
            self._root,
            members,
            master=master,
            compute=compute,
            device=self._device,
            share=Share(ranks.size, ranks.index, frozenset(ranks.shard_axes)),
            place=self._options.residency.place,
            fill=lambda chunk, full: fill(chunk, full, members, self._options.materialize),
        )
        part = Part(unit, spec, StoredShard(unit, self._device, None), self._gather_group(ranks.shard), None)
        if trained:
            self._train(part)
        part.still = [] if trained else list(range(len(members)))
        return part

    def _train(self, part: Part) -> None:
        """Make what the gradients of a part need."""
        unit = part.unit
        _, master, reduce = self._options.precision.resolve(unit.unsharded.dtype)
        unit.keep_in(master)  # it may have been frozen until now
        part.stored.gradients, room = reduce, self._reducer.make_room
        buffer = GradBuffer(unit.chunk, unit.used, reduce, self._device, before_open=room)
        direct_linears(self._root, [*unit.kept, *unit.used])
        keep = functools.partial(self._options.residency.keep_gradient, part.stored)
        part.stored.unreduced, part.stored.complete = buffer, _completing(self)
        part.reducible = Reducible(buffer, part.spec, self.ranks.of(part.spec), keep)

    def _gather_group(self, group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
        """A communicator for gathers alone, one for every group that shares chunks."""
        if group not in self._gather_groups:
            self._gather_groups[group] = second_group(group)
        return self._gather_groups[group]

    @property
    def may_lack_gradients(self) -> bool:
        """Whether a backward may have passed over parameters that a forward was run for."""
        return self._lifecycle.may_lack_gradients

    def stepping(self) -> None:
        """An optimizer is about to change shards: what is gathered of the old ones, or on its way, is dropped."""
        self._gatherer.end_step()

    def stepped(self) -> None:
        """An optimizer has changed shards: nothing stays unsharded. Hooks then gather for the next forward."""
        if self.driver == "hooks":
            self._gatherer.begin_step()
        else:
            self._gatherer.end_step()

    # -- ParameterSharding ---------------------------------------------------------------------------------------

    def unshard(self, module: nn.Module) -> CommHandle:
        """Start gathering the parameters of `module` and below."""
        below = self._below(module)
        for unit in below:
            self._gatherer.start(unit)
        return Gathering(self._gatherer, below)

    def reshard(self, module: nn.Module) -> None:
        """Free the unsharded parameters of `module` and below."""
        for unit in self._below(module):
            self._gatherer.free(unit)

    def reduce(self, module: nn.Module) -> None:
        """Reduce what has accumulated below `module` (driver "actions"; hooks reduce by themselves)."""
        for unit in self._below(module):
            self._reducer.reduce(unit)
        self._reducer.join()

    def _below(self, module: nn.Module) -> list[Sharded]:
        return [self._units[m] for m in module.modules() if m in self._units]

    # -- module lifecycle ----------------------------------------------------------------------------------------

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        sharded = self._units[unit]
        if not backward:
            self._end_backward()  # an earlier one may have raised
            parts = sharded.parts if unit is not self._root else self._parts
            if any(part.unfrozen for part in parts):
                self._admit()
        if self.driver == "actions":
            self._finish_if_started(sharded)
            return
        if unit is self._root and not backward:
            for part in self._parts:
                part.unit.take_writes()
                part.unit.check_shard()
                show(part.unit.kept)  # hidden for a step that raised
            self.ranks.turns.take("a forward" if torch.is_grad_enabled() else "a forward without gradients")
            self._gatherer.begin_forward()
            if self._recorded is not None:
                self._recorded = ([], [], [])  # of the last forward before the first backward
        if backward and not self._open:
            self.ranks.turns.take("a backward")
        self._open = self._open or backward
        if self._recorded is not None:
            self._recorded[backward].append(sharded)
        if backward and self._reducer.is_ready(sharded):
            self._reducer.join()  # its turn has passed: its gradients start anew
        self._gatherer.use(sharded, backward=backward)

    def _finish_if_started(self, unit: Sharded) -> None:
        stale = unit.is_unsharded and self._gatherer.is_stale(unit)
        if stale:
            self._gatherer.free(unit)
        if not unit.is_unsharded and unit.handles is None and unit.parts:
            raise PlanError(
                "a block is used while its parameters are sharded", fix="add an UNSHARD before its first use"
            )
        self._gatherer.finish(unit)

    def after_use(self, unit: nn.Module) -> None:
        if self.driver == "actions":
            return
        for part in self._units[unit].parts:
            part.unit.check_unwritten()
        if unit is self._root:
            self._gatherer.end_pass()
        if not self._gatherer.stays(self._units[unit]):
            self._gatherer.free(self._units[unit])

    def grads_ready(self, unit: nn.Module) -> None:
        sharded = self._units[unit]
        self._collect(sharded)
        if self.driver == "actions":
            return
        if self._recorded is not None:
            self._recorded[2].append(sharded)
        self._gatherer.free(sharded)
        if self._reducer.is_reduced(sharded):
            self._late.append(sharded)
        self._reducer.ready(sharded)

    def backward_done(self) -> None:
        if self.driver == "hooks":
            for unit in self._units.values():
                if not self._reducer.is_ready(unit):
                    self._collect(unit)
            self._gatherer.end_pass()
            self._reducer.end_backward([] if self._reducer.silent else self._agreed_late())
            self._pending, self._agreed = self._reducer.silent, False
            self._learn()
        self._open = False
        self._end_backward()

    def before_graph(self, unit: nn.Module) -> None:
        raise PlanError(
            "second derivatives were asked for of a model whose parameters are sharded",
            cause="create_graph=True: a block's parameters would be used again after its backward has freed them",
            fix="leave parameters unsharded (shard_optimizer, stages 0 to 2), or leave out create_graph",
        )

    def before_copy(self) -> None:
        raise PlanError(
            "a model whose parameters are sharded cannot be copied",
            cause="each rank holds shards of the parameters, and hooks that gather them",
            fix="copy the model before shard_module, or build another and fill it with full_state_dict; for an average "
            "of the weights, cai_zero.Ema",
        )

    def _agreed_late(self) -> list[Sharded]:
        """Units used after their turn, on any rank as long as no order has been learned."""
        if self._recorded is None:
            return self._late
        units = self._gatherer.units
        late = {units.index(unit) for unit in self._late}
        for group in (self.ranks.of().copies, self.ranks.of().shard):
            late = set().union(*all_gather_object(late, group))
        return [units[i] for i in sorted(late)]

    def _end_backward(self) -> None:
        self._reducer.reset()
        self._late.clear()

    def _learn(self) -> None:
        """Agree on the order in which one rank used the units, after the first backward."""
        if self._recorded is None:
            return
        units = self._gatherer.units
        recorded = [[units.index(unit) for unit in uses] for uses in self._recorded]
        for group in (self.ranks.of().copies, self.ranks.of().shard):
            recorded = all_gather_object(recorded, group)[0]
        forward, backward, ready = ([units[i] for i in uses] for uses in recorded)
        # a unit stays unsharded from its first use in a backward to its last
        self._gatherer.order.learn(forward, list(dict.fromkeys(backward)))
        self._reducer.order = list(complete(list(dict.fromkeys(ready)), self._reducer.order))
        self._recorded = None

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Backwards inside need not reduce. With one rank they do not; with more, shards save more than it costs."""
        with self.no_sync() if self.ranks.of().count == 1 else contextlib.nullcontext():
            yield

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Backwards inside accumulate unsharded gradients and communicate none; the next one outside reduces all."""
        return self._reducer.no_sync()

    @property
    def buffers(self) -> list[GradBuffer]:
        """The buffers in which gradients of units accumulate."""
        return [part.reducible.buffer for part in self._reduced if part.reducible is not None]

    def _collect(self, unit: Sharded) -> None:
        for part in unit.parts:
            if part.reducible is not None:
                part.reducible.buffer.collect()

    def finish(self) -> None:
        """Reduce what is pending (tied parameters, a last backward under `no_sync`) and wait for every reduction."""
        for unit in self._reducer.order:
            self._reducer.reduce(unit, tied=True)
            if self._pending or self._open:
                self._reducer.reduce(unit)
        self._pending = self._agreed = self._open = False
        self._end_backward()

    def ensure_gradients(self) -> None:
        """Bring the gradients to where users and optimizers find them. Collective, unless that is done already.

        What is pending is reduced. What no rank has used in this step has no gradient, as torch has it.
        """
        if (self._pending or self._open) and self.driver == "hooks":
            self.finish()
        if self._agreed:
            return
        self._agreed = True
        self.ranks.turns.take("the end of a step's backwards, or a look at its gradients")
        for chunk, index in absent(self.buffers, self.ranks.of()):
            self._options.residency.drop_gradient(self._reduced[chunk].stored, index)

    # -- what compression keeps ----------------------------------------------------------------------------------

    def residuals(self) -> list[torch.Tensor | None]:
        """Return what compression took from this rank's gradients and has not sent, for a resume on the same ranks.

        On other ranks it starts from zero.
        """
        return [entry.residual for entry in self._reducibles()]

    def load_residuals(self, residuals: Sequence[torch.Tensor | None]) -> None:
        """Take over what `residuals` gave on the same rank of the same mesh."""
        for entry, residual in zip(self._reducibles(), residuals, strict=True):
            entry.residual = residual if residual is None else residual.to(self._device, copy=True)

    def _reducibles(self) -> list[Reducible]:
        parts = (part for unit in self._units.values() for part in unit.parts)
        return [part.reducible for part in parts if part.reducible is not None]


def _completing(sharding: ModuleSharding) -> Callable[[], None]:
    """Return `ensure_gradients` of a sharding, for those that the sharding has."""
    weak = weakref.ref(sharding)

    def complete_gradients() -> None:
        alive = weak()
        if alive is not None:
            alive.ensure_gradients()

    return complete_gradients
