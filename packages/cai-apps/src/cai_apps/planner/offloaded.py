"""What `cai_gemini.offload` will need of device, host and disk for a run on one rank."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from cai_apps.config.sections import RunConfig
from cai_apps.planner.memory import COMPUTE_BYTES, MASTER_BYTES


@dataclass(frozen=True)
class OffloadNeeds:
    """Bytes of a run on one rank whose training state may be anywhere."""

    smallest: int
    """Device memory it works from: a block at a time, gradients on their way, activations. An estimate for these."""
    everything: int
    """Device memory from which on everything stays there."""
    device: int | None
    """What it may use of the device (`memory.device_memory`); None: all of it."""
    host: int
    """Host memory it takes at most, with little on the device."""
    disk: int
    """Bytes in files."""


def offload_needs(config: RunConfig, model: nn.Module, activations: int) -> OffloadNeeds:
    """The needs of a resolved config.

    Args:
        model: unsharded, on the meta device; its parameters change their dtype.
        activations: bytes on the device that one microbatch keeps for backward.

    Raises:
        PlanError: `memory.host_memory` or `memory.device_memory` cannot do, as `train` would say.
    """
    import torch

    from cai_gemini.planning import (
        RESIDENCIES,
        Tiers,
        check_device,
        choose,
        chunk_bytes,
        disk_bytes,
        host_bytes,
        least_device,
    )
    from cai_mesh.sizes import parse_bytes
    from cai_mesh.storage import units

    memory = config.memory
    types = {2: torch.bfloat16, 4: torch.float32, 8: torch.float64}
    compute, master = (types[table[config.precision.compute]] for table in (COMPUTE_BYTES, MASTER_BYTES))
    for param in model.parameters():
        param.data = param.data.to(master)  # a meta tensor: only its dtype
    model_units = units(model)
    chunks = chunk_bytes(model_units, compute, torch.optim.AdamW(model.parameters()))
    tiers = RESIDENCIES.get(memory.residency, Tiers()) if memory.residency != "device" else Tiers()
    on_disk = choose(chunks, tiers.disk, tiers.disk_weights, memory.host_memory, disk=memory.nvme is not None)
    device = None if memory.device_memory is None else parse_bytes(memory.device_memory)
    if device is not None:
        check_device(model_units, model, compute, device, memory.device_memory)
    return OffloadNeeds(
        smallest=least_device(model_units, model, compute)[0] + activations,
        everything=sum(c.weights + c.trains * (c.weights + c.master + c.state) for c in chunks) + activations,
        device=device,
        host=host_bytes(chunks, on_disk),
        disk=disk_bytes(chunks, on_disk),
    )
