"""Stage 3: parameters themselves are sharded and whole only while their block is in use.

ZeRO-3 (Rajbhandari et al., arXiv:1910.02054) in the manner of FSDP (Zhao et al., arXiv:2304.11277), on flat chunks:
an all-gather writes the chunk that the block's parameters are views of, a reduce-scatter reads the chunk their
gradients were gathered in.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from cai_mesh.collectives import all_gather_into
from cai_mesh.errors import PlanError
from cai_mesh.lifecycle import ModuleLifecycle
from cai_mesh.protocols import CommHandle, OnDevice, Residency, Stored
from cai_mesh.reduce import ReduceSpec
from cai_mesh.units import FlatUnit, blocks, check_parameters
from cai_zero.gradients import ReduceStream, reduce_chunk
from cai_zero.precision import MixedPrecision
from cai_zero.prefetch import UseOrder
from cai_zero.ranks import DataRanks, data_ranks


@dataclass
class _Sharded:
    """The chunks of one module (one per dtype and reduce spec) and where they stand."""

    module: nn.Module
    parts: list[_Part]
    handles: list[CommHandle] | None = None
    gathered: tuple[int, ...] = ()

    @property
    def is_whole(self) -> bool:
        return self.parts[0].unit.is_whole

    @property
    def versions(self) -> tuple[int, ...]:
        """Changes with every write to the rows, by an optimizer's step or a checkpoint."""
        return tuple(part.unit.shard._version for part in self.parts)


@dataclass
class _Part:
    """One chunk: its unit, where its shard and gradients are stored, gradients not yet reduced."""

    unit: FlatUnit
    spec: ReduceSpec
    weights: Stored
    reduce_dtype: torch.dtype
    gradients: torch.Tensor | None = None

    @property
    def trainable(self) -> bool:
        return self.unit.kept[0].requires_grad

    @property
    def kept_gradient(self) -> torch.Tensor | None:
        """The rows' gradient that the kept parameters view, unless the loop has dropped it (`zero_grad`)."""
        return self.unit.shard_gradient


class ModuleSharding:
    """Keeps a model's parameters sharded; a `ParameterSharding` and a `GradSync`. Found by `sharding_of(model)`.

    Reductions happen after every backward, into this rank's rows, also under `defer`: whole gradients never pile up.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: DataRanks,
        precision: MixedPrecision,
        residency: Residency,
        driver: Literal["hooks", "actions"],
    ):
        self.driver = driver
        self._root, self._ranks, self._residency = model, ranks, residency
        units = blocks(model)
        if not units:
            raise PlanError("the model has no parameters to shard")
        check_parameters(pair for params in units.values() for pair in params)
        self._units = {m: _Sharded(m, self._parts(m, params, precision)) for m, params in units.items()}
        device = next(iter(units.values()))[0][1].device
        self._gather_stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._reduce_stream = ReduceStream(device)
        self._order: UseOrder[nn.Module] = UseOrder()
        self._reduced: set[nn.Module] = set()
        self._lifecycle = ModuleLifecycle(
            {m: [p for part in u.parts for p in part.unit.used] for m, u in self._units.items()}
        )
        self._lifecycle.listen(self)

    def _parts(
        self, module: nn.Module, params: list[tuple[str, nn.Parameter]], precision: MixedPrecision
    ) -> list[_Part]:
        kinds: dict[tuple, list[tuple[str, nn.Parameter]]] = {}
        for name, param in params:
            kinds.setdefault((param.dtype, param.requires_grad, ReduceSpec.of(param)), []).append(
                (name, param)
            )
        parts = []
        for (dtype, _, spec), members in kinds.items():
            compute, master, reduce = precision.resolve(dtype)
            unit = FlatUnit(
                self._root,
                members,
                world=self._ranks.size,
                index=self._ranks.index,
                shard_axes=frozenset(self._ranks.shard_axes),
                master=master,
                compute=compute,
                device=members[0][1].device,
                place=self._residency.place,
            )
            parts.append(_Part(unit, spec, Stored(unit.chunk, unit.shard, unit.whole.device), reduce))
        return parts

    # -- ParameterSharding ---------------------------------------------------------------------------------------

    def unshard(self, module: nn.Module) -> CommHandle:
        """Start gathering the parameters of `module` and below."""
        units = [self._units[m] for m in module.modules() if m in self._units]
        for unit in units:
            self._start_gather(unit)
        return _Gathering(self, units)

    def reshard(self, module: nn.Module) -> None:
        """Free the whole parameters of `module` and below."""
        for m in module.modules():
            if m in self._units:
                self._free(self._units[m])

    def reduce(self, module: nn.Module) -> None:
        """Reduce what has accumulated below `module` (driver "actions"; hooks reduce by themselves)."""
        for m in module.modules():
            if m in self._units:
                self._reduce(self._units[m])
        self._reduce_stream.join()

    def _start_gather(self, unit: _Sharded) -> None:
        if unit.is_whole or unit.handles is not None:
            return
        unit.gathered = unit.versions
        for part in unit.parts:
            part.unit.allocate_storage()
        with self._beside_compute():
            unit.handles = [self._gather(part) for part in unit.parts]

    @torch.no_grad()
    def _gather(self, part: _Part) -> CommHandle:
        unit = part.unit
        self._residency.fetch(part.weights).wait()
        rows = unit.whole[unit.low : unit.high]
        rows.copy_(part.weights.on_device, non_blocking=True)
        asynchronous = self._gather_stream is None
        return all_gather_into(unit.whole, rows, self._ranks.shard, async_op=asynchronous)

    @contextlib.contextmanager
    def _beside_compute(self) -> Iterator[None]:
        if self._gather_stream is None:
            yield
            return
        self._gather_stream.wait_stream(torch.cuda.current_stream(self._gather_stream.device))
        with torch.cuda.stream(self._gather_stream):
            yield

    def _finish_gather(self, unit: _Sharded) -> None:
        if unit.is_whole:
            return
        self._start_gather(unit)
        for handle in unit.handles or ():
            handle.wait()
        if self._gather_stream is not None:
            torch.cuda.current_stream(self._gather_stream.device).wait_stream(self._gather_stream)
        unit.handles = None
        for part in unit.parts:
            self._residency.release(part.weights)
            part.unit.swap_in()

    def _free(self, unit: _Sharded) -> None:
        if unit.handles is not None:
            self._finish_gather(unit)
        if unit.is_whole:
            for part in unit.parts:
                part.unit.free_storage()

    # -- module lifecycle ----------------------------------------------------------------------------------------

    def before_use(self, unit: nn.Module, *, backward: bool) -> None:
        sharded = self._units[unit]
        if not backward:
            self._reduced.clear()  # an earlier backward may have raised
            if (sharded.is_whole or sharded.handles is not None) and sharded.gathered != sharded.versions:
                self._free(sharded)  # gathered before the optimizer stepped
        if self.driver == "actions":
            self._finish_if_started(sharded)
            return
        if not backward and self._order.is_first(unit):
            self._order.start()
        if not sharded.is_whole:
            self._finish_gather(sharded)
            following = self._order.use(unit)
            if following is not None:
                self._start_gather(self._units[following])

    def _finish_if_started(self, unit: _Sharded) -> None:
        if not unit.is_whole and unit.handles is None:
            raise PlanError(
                "a block is used while its parameters are sharded", fix="add an UNSHARD before its first use"
            )
        self._finish_gather(unit)

    def after_use(self, unit: nn.Module) -> None:
        if self.driver == "hooks" and not (unit is self._root and torch.is_grad_enabled()):
            self._free(self._units[unit])

    def grads_ready(self, unit: nn.Module) -> None:
        sharded = self._units[unit]
        self._collect(sharded)
        if self.driver == "hooks":
            self._reduce(sharded)
            self._free(sharded)

    def backward_done(self) -> None:
        if self.driver == "hooks":
            for unit in self._units.values():
                if unit.module not in self._reduced:
                    self._collect(unit)
                    self._reduce(unit)  # other ranks may have used what this one did not
                self._free(unit)
        self._reduced.clear()
        self._reduce_stream.join()

    # -- gradients -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def defer(self) -> Iterator[None]:
        """Nothing to defer: every backward reduces into this rank's rows, which add up."""
        yield

    @torch.no_grad()
    def _collect(self, unit: _Sharded) -> None:
        for part in unit.parts:
            if any(p.grad is not None for p in part.unit.used):
                fresh = part.gradients is None
                if part.gradients is None:
                    part.gradients = part.unit.chunk.allocate(part.reduce_dtype, part.unit.whole.device)
                part.unit.take_gradients(part.gradients, fresh=fresh)

    @torch.no_grad()
    def _reduce(self, unit: _Sharded, *, tied: bool = False) -> None:
        """Reduce whole gradients into rows. Tied parameters wait for `finish`: their other holder may lag behind."""
        self._reduced.add(unit.module)
        for part in unit.parts:
            if not part.trainable or (part.spec.tied is not None) != tied:
                continue
            full, part.gradients = part.gradients, None
            if full is None:
                full = part.unit.chunk.allocate(part.reduce_dtype, part.unit.whole.device, zero=True)
            with self._reduce_stream.after_compute(full):
                rows = reduce_chunk(full, self._ranks, part.spec).to(part.unit.shard.dtype)
                if part.kept_gradient is None:
                    part.unit.set_shard_gradient(self._residency.place(rows))
                else:
                    part.kept_gradient.add_(rows)

    def finish(self) -> None:
        """Reduce tied parameters and wait for every reduction."""
        for unit in self._units.values():
            self._reduce(unit, tied=True)
        self._reduced.clear()
        self._reduce_stream.join()


class _Gathering:
    """The `CommHandle` of an `unshard`."""

    def __init__(self, sharding: ModuleSharding, units: list[_Sharded]):
        self._sharding, self._units = sharding, units

    def wait(self) -> None:
        for unit in self._units:
            self._sharding._finish_gather(unit)


def sharding_of(model: nn.Module) -> ModuleSharding:
    """The `ModuleSharding` that `shard_module` attached. Raises `PlanError` when there is none."""
    found = getattr(model, "cai_sharding", None)
    if found is None:
        raise PlanError("this model is not sharded", fix="call shard_module(model, mesh) first")
    return found


def shard_module(
    model: nn.Module,
    mesh: DeviceMesh | None,
    *,
    precision: MixedPrecision | None = None,
    residency: Residency | None = None,
    driver: Literal["hooks", "actions"] = "hooks",
) -> nn.Module:
    """Shard the parameters of a model over the data ranks of a mesh (ZeRO stage 3), in place; returns the model.

    Afterwards `model.named_parameters()` gives the same names, each parameter a 1-d tensor of this rank's rows (some
    may be empty). Build any elementwise optimizer over them. Every block (element of an `nn.ModuleList`) is gathered
    before its forward and backward and freed after; gradients are reduced while backward runs and appear as `.grad`
    of the rows. Norms go through `cai_mesh.clip_grad_norm_`, checkpoints through `cai_mesh.checkpoint`.

    Args:
        model: with real (not meta) parameters, equal on all data ranks.
        mesh: see `cai_zero.ranks.data_ranks`. None: one process.
        precision: dtypes of gathered parameters, of the rows and of the reduction.
        residency: which memory the rows and their gradients live in between uses. None: the device.
        driver: "hooks" gathers around every module call; "actions" leaves it to a pipeline schedule.

    Gathers and reductions are collective: in every pass all data ranks use the same blocks, and in each block the
    same parameters, in the same order.

    Raises `PlanError` for parameters that cannot be sharded and for an unknown driver.
    """
    if driver not in ("hooks", "actions"):
        raise PlanError("unknown driver of a sharded module", got=driver, expected="'hooks' or 'actions'")
    if getattr(model, "cai_sharding", None) is not None:
        raise PlanError("this model is already sharded")
    sharding = ModuleSharding(
        model, data_ranks(mesh), precision or MixedPrecision(), residency or OnDevice(), driver
    )
    model.cai_sharding = sharding  # type: ignore[assignment]
    return model
