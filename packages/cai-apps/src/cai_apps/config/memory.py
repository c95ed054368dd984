"""Checks of the section `memory`: what cannot work together, and what this machine lacks for it."""

from __future__ import annotations

import os
from pathlib import Path

from cai_apps.config.sections import RunConfig
from cai_mesh.errors import ConfigError, PlanError

BUDGETS = ("device_memory", "host_memory", "nvme")


def offloads(config: RunConfig, ranks: int) -> bool:
    """Whether the model is trained by `cai_gemini.offload`: on one rank, unless all stays on its device."""
    return ranks == 1 and config.memory.residency != "device"


def check_memory(config: RunConfig, ranks: int) -> None:
    """Raises ConfigError for settings of `memory` that no machine could follow."""
    memory = config.memory
    if memory.activations == "host" and memory.recompute not in ("full", "auto"):
        raise ConfigError(
            'memory.activations = "host" keeps the inputs of blocks that run again in backward',
            got=f'memory.recompute = "{memory.recompute}"',
            expected='memory.recompute = "full"',
            fix="set memory.recompute to full",
        )
    given = [f"memory.{name}" for name in BUDGETS if getattr(memory, name) is not None]
    if memory.residency == "device" and given:
        raise ConfigError(
            f"{given[0]} does nothing while all training state stays on the device",
            got='memory.residency = "device"',
            fix="set memory.residency to auto, host or nvme",
        )
    if memory.residency != "device" and (config.optimizer.kind, config.optimizer.state) != ("adamw", "fp32"):
        raise ConfigError(
            f'memory.residency = "{memory.residency}" steps parameters chunk by chunk, element by element',
            got=f'optimizer.kind = "{config.optimizer.kind}", optimizer.state = "{config.optimizer.state}"',
            expected='optimizer.kind = "adamw" with optimizer.state = "fp32"',
            fix='set memory.residency to "device", or use adamw',
        )
    if memory.residency != "device" and config.precision.compute == "fp16":
        raise ConfigError(
            'precision.compute = "fp16" looks for overflow in gradients that memory.residency keeps elsewhere',
            got=f'memory.residency = "{memory.residency}"',
            fix='set precision.compute to "bf16", or memory.residency to "device"',
        )
    if memory.residency == "nvme" and memory.nvme is None:
        raise ConfigError(
            'memory.residency = "nvme" needs a directory', fix="set memory.nvme to one on a local disk"
        )
    if memory.nvme is not None and config.checkpoint.background == "on":
        raise ConfigError(
            "checkpoint.background copies to host memory what memory.nvme keeps out of it",
            got='checkpoint.background = "on"',
            fix='set checkpoint.background to "auto" or "off": chunks are then written one by one',
        )
    for name in ("device_memory", "host_memory"):
        check_size(f"memory.{name}", getattr(memory, name))
    if ranks > 1 and memory.residency != "device":
        _check_many_ranks(config, ranks)


def _check_many_ranks(config: RunConfig, ranks: int) -> None:
    memory = config.memory
    if config.parallel.zero != 3:
        raise ConfigError(
            f'memory.residency = "{memory.residency}" on several ranks needs parameters in shards',
            got=f"parallel.zero = {config.parallel.zero}, {ranks} ranks",
            expected="parallel.zero = 3",
            fix="set parallel.zero to 3",
        )


def check_size(key: str, size: int | str | None) -> None:
    """Raises ConfigError for what is not a number of bytes; None is none."""
    if size is None:
        return
    from cai_mesh.sizes import parse_bytes

    try:
        found = parse_bytes(size)
    except PlanError:
        found = 0
    if found < 1:
        raise ConfigError(
            f"{key} is not a size",
            got=repr(size),
            expected='bytes, or such as "22GB" (10^9) or "22GiB" (2^30)',
        )


def machine_bytes() -> int:
    """Bytes of this machine's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def check_machine(config: RunConfig, device: str) -> None:
    """Raises ConfigError for what the machine that trains must have.

    Args:
        device: "cpu" or "cuda", where the ranks will compute.
    """
    memory = config.memory
    if memory.residency == "auto" and device == "cpu" and memory.device_memory is None:
        raise ConfigError(
            'memory.residency = "auto" plans for a device, and the CPU has no memory of its own',
            got="train.device is the CPU, memory.device_memory is not set",
            fix="set memory.device_memory to let the CPU play a device of that size, or memory.residency to device",
        )
    if memory.nvme is not None:
        directory = Path(memory.nvme).expanduser()
        if not directory.is_dir() or not os.access(directory, os.W_OK):
            raise ConfigError(
                "memory.nvme is not a directory that can be written to",
                got=str(directory),
                expected="a directory on a local disk",
            )
