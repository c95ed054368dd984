"""`offload`: one device, an ordinary loop, and a model larger than the device.

Weights, gradients and optimizer state live in device and host memory as one (ZeRO-Offload, Ren et al.,
arXiv:2101.06840; chunks and a traced step as in PatrickStar, Fang et al., arXiv:2108.05818).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from cai_gemini.allocator import expand_segments
from cai_gemini.budget import Units, check_device, device_budget, kinds
from cai_gemini.chunk import OffloadedChunk
from cai_gemini.chunk_step import ChunkStep
from cai_gemini.disk_plan import choose, chunk_bytes
from cai_gemini.disk_use import disk_traffic, disk_user, open_store, rates_with_disk
from cai_gemini.engine import Engine, Planner, Schedule
from cai_gemini.optimizer import OffloadedOptimizer
from cai_gemini.pieces import buffer_bytes
from cai_gemini.policy import NONE_STREAMABLE, Plan, Sizes, Streamable, fractions
from cai_gemini.rates import measure
from cai_gemini.simulate import Rates, Step, best_plan
from cai_gemini.streamed import can_stream, check_streamed
from cai_gemini.trace import Trace
from cai_gemini.unit import ChunkUnit
from cai_gemini.uses import ModuleUses, collect_gradients
from cai_mesh.errors import PlanError
from cai_mesh.gradients import check_no_gradients, direct_linears
from cai_mesh.storage import (
    check_alone,
    check_arguments,
    check_elementwise,
    check_parameters,
    check_there,
    guard_saving,
    reduces_itself,
    units,
)


@dataclass(frozen=True)
class Tiers:
    """How much stays on the device and how much goes to a disk, as fractions of all bytes; the rest lives on the host.

    Args:
        weights: in the dtype of computation, that stay on the device. Others are copied there before each use.
        state: master weights, optimizer state and gradients that stay on the device, and their weights with them. Other
            state is stepped on the host.
        streamed: state that lives on the host and is stepped on the device: it goes there in pieces and comes back.
            Nothing that is on a disk is streamed. Adam and AdamW only.
        disk: master weights and optimizer state on the disk, of the chunks used last.
        disk_weights: weights in the dtype of computation on the disk, of the chunks used last, and their state too.

    Raises `PlanError` outside 0..1, and for more state than there is.
    """

    weights: float = 0.0
    state: float = 0.0
    disk: float = 0.0
    disk_weights: float = 0.0
    streamed: float = 0.0

    def __post_init__(self) -> None:
        for name in ("weights", "state", "disk", "disk_weights", "streamed"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise PlanError(f"{name} is no fraction", got=getattr(self, name), expected="0 to 1")
        disk = max(self.disk, self.disk_weights)
        if self.state + self.streamed + disk > 1.0 + 1e-9:
            raise PlanError(
                "more state than there is",
                got=f"{self.state} on the device, {self.streamed} streamed, {disk} on the disk",
            )


Members = list[tuple[str, nn.Parameter]]
RESIDENCIES = {"device": Tiers(1.0, 1.0), "host": Tiers(), "nvme": Tiers(disk=1.0, disk_weights=1.0)}


@dataclass(frozen=True)
class Tuning:
    """How `offload` works, and what it would otherwise measure.

    Args:
        overlap: whether host steps run in the background; False: `step` waits for them.
        warmup: optimizer steps that are traced before the plan is made.
        rates: of the link, the disk and the optimizer; None: measured when the model is offloaded.
        observe: returns the most bytes in use on the device since its last call; None: torch's allocator is asked.
        stream: whether "auto" may stream state: state that lives on the host is stepped on the device, piece by piece.
            `Tiers(streamed=...)` asks for it whatever this says.
        expandable_segments: let torch's allocator map memory page by page from now on, for the whole process, unless
            its environment variable is set: less is lost to holes.
    """

    overlap: bool = True
    warmup: int = 2
    rates: Rates | None = None
    observe: Callable[[], int] | None = None
    stream: bool = True
    expandable_segments: bool = True


def offload(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    residency: str | Tiers = "auto",
    device: torch.device | str | None = None,
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    nvme: str | os.PathLike[str] | None = None,
    compute: torch.dtype | None = None,
    materialize: Callable[[str, nn.Parameter], torch.Tensor] | None = None,
    tuning: Tuning = Tuning(),
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Train a model whose weights, gradients and optimizer state do not fit the device, in place.

    The loop stays as it is: forward, backward, `optimizer.clip_grad_norm_(...)`, `optimizer.step()`, `zero_grad()`.
    Parameters keep their names; between uses each is a flat tensor of master weights, on the host or the device.
    Two steps run with as little on the device as possible and are traced; then what stays is decided. Other blocks are
    brought ahead of their use, and gradients leave as they come. Steps on the host run while the next forward does,
    and are awaited block by block: the values are those of a loop without offload, bit for bit in the same arithmetic.

    Args:
        model: on the device it runs on, on the host, or on the meta device.
        optimizer: any elementwise torch optimizer over the model's parameters; its state comes along. Adam and AdamW
            run torch's fused kernels. A parameter without a gradient is not stepped.
        residency: "auto" (the plan of the shortest predicted step that fits), "host", "device", "nvme", or `Tiers`.
        device: where it runs; default: where it is. Its buffers are moved there, but for those of a meta model.
        device_memory: bytes, or such as "22GB" (10^9) or "22GiB"; default: what torch may take of the device.
            On a GPU tensors get less of it, 512 MiB below 17 GB and 3 % above: torch's allocator cannot use all.
        host_memory: bytes that may be used there; more goes to `nvme` or is refused. Default: no limit.
        nvme: a directory on a disk, for what has no room in host memory (first optimizer state, then weights) or is to
            be there ("nvme", `Tiers`). A kept parameter that is read is brought into memory until the next step.
        compute: dtype of the weights on the device; None: as they are. Master weights keep the original dtype.
        materialize: (name, meta parameter) -> its initial values. They are put together on the host, chunk by chunk.
        tuning: details.

    Returns the model and its optimizer. Raises `PlanError` for an unknown residency, an optimizer that holds other
    parameters, parameters that cannot be flat, and memory too small: for one chunk at once, or after the first traced
    steps for a chunk with its activations, both with the smallest that works; `NvmeError` for a bad directory.
    """
    tiers = tiers_of(residency)
    _check(model, optimizer, tiers or Tiers())
    where = _device(model, device, materialize)
    budget = device_budget(device_memory, where, needed=tiers is None)
    found = _units(model)
    check_device(found, model, compute, budget, device_memory)
    sizes, asked = chunk_bytes(found, compute, optimizer), tiers or Tiers()
    on_disk = choose(sizes, asked.disk, asked.disk_weights, host_memory, disk=nvme is not None)
    expand_segments(where, wanted=tuning.expandable_segments)
    engine = Engine(where)
    engine.store = open_store(nvme, sizes, on_disk)
    made, chunks = _chunks(model, found, engine, compute, materialize, disk_user(engine, sizes, on_disk))
    everything = [chunk for some in chunks.values() for chunk in some]
    take_over(optimizer, everything, _flat_parameters(made))
    ModuleUses(engine, model, made, chunks)
    tuning = measured(tuning, engine) if tiers is None else tuning
    plans = schedule(tiers, everything, budget, where, tuning)
    engine.start(everything, plans, tuning.observe, chunks[model])
    return model, OffloadedOptimizer(optimizer, engine, tuning.overlap, where)


def _units(model: nn.Module) -> Units:
    """The parameters of every unit, all of which can be moved."""
    found = units(model)
    check_parameters((pair for params in found.values() for pair in params), meta=True)
    check_no_gradients(model.parameters())
    return found


def _chunks(
    model: nn.Module,
    found: Units,
    engine: Engine,
    compute: torch.dtype | None,
    materialize: Callable[[str, nn.Parameter], torch.Tensor] | None,
    use_disk: Callable[[int, OffloadedChunk], None],
) -> tuple[dict[nn.Module, list[ChunkUnit]], dict[nn.Module, list[OffloadedChunk]]]:
    """Move the model's parameters into chunks in host memory, one after the other."""
    made: dict[nn.Module, list[ChunkUnit]] = {}
    chunks: dict[nn.Module, list[OffloadedChunk]] = {}
    index = 0
    _move_buffers(model, engine.copies.device)
    for module, params in found.items():
        made[module], chunks[module] = [], []
        for members in kinds(params):
            unit = _unit(model, members, compute, engine.copies.device, materialize)
            chunk = _chunk(unit, engine)
            use_disk(index, chunk)
            made[module].append(unit)
            chunks[module].append(chunk)
            index += 1
    direct_linears(model, _flat_parameters(made).values())
    reduces_itself(model)
    guard_saving(model)
    return made, chunks


def _unit(
    model: nn.Module,
    members: Members,
    compute: torch.dtype | None,
    device: torch.device,
    materialize: Callable[[str, nn.Parameter], torch.Tensor] | None,
) -> ChunkUnit:
    param = members[0][1]
    return ChunkUnit(
        model,
        members,
        master=param.dtype,
        compute=compute or param.dtype,
        device=device,
        home=torch.device("cpu"),
        fill=lambda chunk, full: _fill(chunk.views(full), members, materialize),
    )


def _flat_parameters(made: Mapping[nn.Module, Sequence[ChunkUnit]]) -> dict[int, nn.Parameter]:
    """The flat parameters by the ids of those they were made from."""
    flats = [unit for some in made.values() for unit in some]
    return {b: a for unit in flats for b, a in zip(unit.sources, unit.kept, strict=True)}


def _chunk(unit: ChunkUnit, engine: Engine) -> OffloadedChunk:
    if not unit.kept[0].requires_grad:
        chunk = OffloadedChunk(unit, None, engine)
        chunk.still = list(range(len(unit.kept)))
        return chunk
    chunk = OffloadedChunk(unit, unit.weights.dtype, engine)
    collect_gradients(chunk)
    return chunk


def measured(tuning: Tuning, engine: Engine) -> Tuning:
    """With rates of this machine, unless they were given."""
    if tuning.rates is not None:
        return tuning
    return replace(tuning, rates=rates_with_disk(engine.store, measure(engine.copies.device, engine.worker)))


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[name] = buffer.to(device)


def _fill(
    views: list[torch.Tensor],
    members: Members,
    materialize: Callable[[str, nn.Parameter], torch.Tensor] | None,
) -> None:
    for view, (name, param) in zip(views, members, strict=True):
        view.copy_(materialize(name, param) if materialize is not None and param.is_meta else param.detach())


def _device(
    model: nn.Module, device: torch.device | str | None, materialize: Callable | None
) -> torch.device:
    """Where the model runs. Raises `PlanError` where that is nowhere, or nothing says what its values are."""
    found = torch.device(device) if device is not None else next(model.parameters()).device
    check_there(found)
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    if found.type == "meta":
        raise PlanError("the model has no device to run on", got="meta", fix="pass device=...")
    without = [n for n, p in model.named_parameters() if p.is_meta] if materialize is None else []
    if without:
        raise PlanError(
            f"parameter {without[0]!r} has no values", got="meta tensor", fix="pass materialize=..."
        )
    return found


def tiers_of(residency: str | Tiers) -> Tiers | None:
    """The fractions a residency stands for; None for "auto". Raises `PlanError` for an unknown one."""
    if isinstance(residency, Tiers):
        return residency
    if residency != "auto" and residency not in RESIDENCIES:
        raise PlanError(
            "unknown residency", got=repr(residency), expected="'auto', 'host', 'device' or Tiers(...)"
        )
    return RESIDENCIES.get(residency)


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, tiers: Tiers) -> None:
    """Raise `PlanError` for a model or an optimizer that cannot be offloaded."""
    check_arguments(model, optimizer, what="offload")
    check_alone(
        "offload", "shard_module(model, mesh, residency=cai_gemini.ChunkResidency(...)) offloads shards"
    )
    check_elementwise(optimizer)
    check_streamed(tiers.streamed, optimizer)
    own = {id(p) for p in model.parameters()}
    if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
        raise PlanError(
            "the optimizer holds parameters the model does not have", fix="build it on model.parameters()"
        )


def take_over(
    optimizer: torch.optim.Optimizer, chunks: Sequence[OffloadedChunk], flat: Mapping[int, nn.Parameter]
) -> None:
    """Let the optimizer have the flat parameters, with what state it has, and step chunk by chunk.

    Args:
        flat: the flat parameter by the id of the one the optimizer may have in its place.
    """
    for group in optimizer.param_groups:
        for i, param in enumerate(group["params"]):
            own = flat[id(param)]
            state = optimizer.state.pop(param, None)
            if state is not None:
                optimizer.state[own] = {name: _flat_on_host(value, own) for name, value in state.items()}
            group["params"][i] = own
    for chunk in chunks:
        chunk.prepare(ChunkStep(optimizer, chunk.unit))


def _flat_on_host(value: Any, param: nn.Parameter) -> Any:
    """State of a parameter, flat where it is as large; counters too are read on the host at every step."""
    if not isinstance(value, torch.Tensor):
        return value
    like = value.dim() > 0 and value.numel() == param.numel()
    return value.detach().flatten().cpu() if like else value.detach().cpu()


def schedule(
    tiers: Tiers | None,
    chunks: Sequence[OffloadedChunk],
    budget: int,
    device: torch.device,
    tuning: Tuning,
) -> Schedule:
    """How chunks are planned: by fractions, or (None) by the shortest simulated step, with rates measured now."""
    return Schedule(budget, _planner(tiers, chunks, budget, device, tuning), tuning.warmup)


def _step(chunks: Sequence[OffloadedChunk]) -> Step:
    """What a step does, as of now: chunks that were frozen may be trained since."""
    return Step(
        [chunk.unit.shard.numel() if chunk.trains else 0 for chunk in chunks],
        disk=disk_traffic(chunks),
        streamable=_streamable(chunks),
    )


def _streamable(chunks: Sequence[OffloadedChunk]) -> Streamable:
    able = {i: chunk for i, chunk in enumerate(chunks) if can_stream(chunk)}
    return Streamable(frozenset(able), buffer_bytes([*able.values()]))


def _planner(
    tiers: Tiers | None,
    chunks: Sequence[OffloadedChunk],
    budget: int,
    device: torch.device,
    tuning: Tuning,
) -> Planner:
    if tiers is not None:
        shares = (tiers.weights, tiers.state, tiers.streamed)
        return lambda trace, sizes, _passes: fractions(trace, sizes, *shares, _step(chunks).streamable)
    known = tuning.rates or measure(device)

    def shortest(trace: Trace, sizes: Sequence[Sizes], passes: int) -> Plan:
        step = replace(_step(chunks), passes=passes)
        step = step if tuning.stream else replace(step, streamable=NONE_STREAMABLE)
        return best_plan(trace, sizes, budget, known, step)

    return shortest
