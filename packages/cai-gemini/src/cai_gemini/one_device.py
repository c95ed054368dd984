"""`offload`: one device, an ordinary loop, and a model larger than the device.

Weights, gradients and optimizer state live in device and host memory as one (ZeRO-Offload, Ren et al.,
arXiv:2101.06840; chunks and a traced step as in PatrickStar, Fang et al., arXiv:2108.05818).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from cai_gemini.chunk.chunk import OffloadedChunk
from cai_gemini.chunk.unit import ChunkUnit
from cai_gemini.engine.engine import Engine
from cai_gemini.engine.planner import Tuning
from cai_gemini.engine.uses import ModuleUses, collect_gradients
from cai_gemini.factory import Factory, take_over
from cai_gemini.memory.allocator import expand_segments
from cai_gemini.optimizer import OffloadedOptimizer
from cai_gemini.planning.budget import Units, check_device, kinds
from cai_gemini.planning.disk_plan import chunk_bytes
from cai_gemini.planning.tiers import Tiers, tiers_of
from cai_mesh.errors import PlanError
from cai_mesh.gradients import check_no_gradients, direct_linears
from cai_mesh.storage import (
    check_alone,
    check_arguments,
    check_elementwise,
    check_parameters,
    check_there,
    guard_state,
    reduces_itself,
    units,
)

Members = list[tuple[str, nn.Parameter]]


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
    tuning: Tuning = Tuning(),  # noqa: B008 (frozen)
) -> tuple[nn.Module, OffloadedOptimizer]:
    """Train a model whose weights, gradients and optimizer state do not fit the device, in place.

    The loop stays as it is: forward, backward, `optimizer.clip_grad_norm_(...)`, `optimizer.step()`, `zero_grad()`.
    Parameters keep their names; between uses each is a flat tensor of master weights, on the host or the device.
    Two steps run with as little on the device as possible and are traced; then what stays is decided. Other blocks are
    brought ahead of their use, and gradients leave as they come. Steps on the host run while the next forward does,
    and are awaited block by block: the values are those of a loop without offload, bit for bit in the same arithmetic.

    Args:
        model: the model, on the device it runs on, on the host, or on the meta device.
        optimizer: any elementwise torch optimizer over the model's parameters; its state comes along. Adam and AdamW
            run torch's fused kernels. A parameter without a gradient is not stepped.
        residency: "auto" (the plan of the shortest predicted step that fits), "host", "device", "nvme", or `Tiers`.
        device: the device it runs on; default: that of its parameters. Its buffers are moved there, but for those of a
            meta model.
        device_memory: bytes, or such as "22GB" (10^9) or "22GiB"; default: what torch may take of the device.
            On a GPU tensors get less of it, 512 MiB below 17 GB and 3 % above: torch's allocator cannot use all.
        host_memory: bytes that may be used there; more goes to `nvme` or is refused. Default: no limit.
        nvme: a directory on a disk, for what has no room in host memory (first optimizer state, then weights) or is to
            be there ("nvme", `Tiers`). A kept parameter that is read is brought into memory until the next step.
        compute: dtype of the weights on the device; None: as they are. Master weights keep the original dtype.
        materialize: (name, meta parameter) -> its initial values. They are put together on the host, chunk by chunk.
        tuning: details.

    Returns the model and its optimizer. Raises `PlanError` for an unknown residency, an optimizer that holds other
    parameters, parameters that cannot be flat, and memory too small for one chunk at once, or after the first traced
    steps for a chunk with its activations, both with the smallest that works; `NvmeError` for a bad directory.
    """
    factory = Factory(tiers_of(residency), device_memory, host_memory, nvme, tuning)
    _check(model, optimizer, factory)
    where = _device(model, device, materialize)
    budget = factory.budget(where)
    blocks = _units(model)
    check_device(blocks, model, compute, budget, device_memory)
    sizes = chunk_bytes(blocks, compute, optimizer)
    expand_segments(where, enabled=tuning.expandable_segments)
    engine = Engine(where)
    use_disk = factory.disk_user(engine, sizes, factory.on_disk(sizes))
    flats, chunks = _chunks(model, blocks, engine, compute, materialize, use_disk)
    everything = [chunk for some in chunks.values() for chunk in some]
    take_over(optimizer, everything, _flat_parameters(flats))
    uses = ModuleUses(engine, model, flats, chunks)
    plans = factory.schedule(engine, everything, budget)
    engine.start(everything, plans, tuning.observe, chunks[model])
    offloaded = factory.optimizer(optimizer, engine)
    offloaded.register_step_pre_hook(lambda *_: uses.check_backward())
    return model, offloaded


def _units(model: nn.Module) -> Units:
    """The parameters of every unit, all of which can be moved."""
    blocks = units(model)
    check_parameters((pair for params in blocks.values() for pair in params), meta=True)
    check_no_gradients(model.parameters())
    return blocks


def _chunks(
    model: nn.Module,
    blocks: Units,
    engine: Engine,
    compute: torch.dtype | None,
    materialize: Callable[[str, nn.Parameter], torch.Tensor] | None,
    use_disk: Callable[[int, OffloadedChunk], None],
) -> tuple[dict[nn.Module, list[ChunkUnit]], dict[nn.Module, list[OffloadedChunk]]]:
    """Move the model's parameters into chunks in host memory, one after the other."""
    flats: dict[nn.Module, list[ChunkUnit]] = {}
    chunks: dict[nn.Module, list[OffloadedChunk]] = {}
    index = 0
    _move_buffers(model, engine.copies.device)
    for module, params in blocks.items():
        flats[module], chunks[module] = [], []
        for members in kinds(params):
            unit = _unit(model, members, compute, engine.copies.device, materialize)
            chunk = _chunk(unit, engine)
            use_disk(index, chunk)
            flats[module].append(unit)
            chunks[module].append(chunk)
            index += 1
    direct_linears(model, _flat_parameters(flats).values())
    reduces_itself(model)
    guard_state(model)
    return flats, chunks


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


def _flat_parameters(flats: Mapping[nn.Module, Sequence[ChunkUnit]]) -> dict[int, nn.Parameter]:
    """The flat parameters by the ids of those they were made from."""
    units_of_all = [unit for some in flats.values() for unit in some]
    return {b: a for unit in units_of_all for b, a in zip(unit.sources, unit.kept, strict=True)}


def _chunk(unit: ChunkUnit, engine: Engine) -> OffloadedChunk:
    if not unit.kept[0].requires_grad:
        chunk = OffloadedChunk(unit, None, engine)
        chunk.still = list(range(len(unit.kept)))
        return chunk
    chunk = OffloadedChunk(unit, unit.weights.dtype, engine)
    collect_gradients(chunk)
    return chunk


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
    """Return the device the model runs on. Raises `PlanError` where there is none, or nothing gives its values."""
    place = torch.device(device) if device is not None else next(model.parameters()).device
    check_there(place)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", torch.cuda.current_device())
    if place.type == "meta":
        raise PlanError("the model has no device to run on", got="meta", fix="pass device=...")
    without = [n for n, p in model.named_parameters() if p.is_meta] if materialize is None else []
    if without:
        raise PlanError(
            f"parameter {without[0]!r} has no values", got="meta tensor", fix="pass materialize=..."
        )
    return place


def _check(model: nn.Module, optimizer: torch.optim.Optimizer, factory: Factory) -> None:
    """Raise `PlanError` for a model or an optimizer that cannot be offloaded."""
    check_arguments(model, optimizer, what="offload")
    check_alone(
        "offload", "shard_module(model, mesh, residency=cai_gemini.ChunkResidency(...)) offloads shards"
    )
    check_elementwise(optimizer)
    factory.check(optimizer, model.parameters(), "build it on model.parameters()")
