"""How much memory there is."""

from __future__ import annotations

import torch

from cai_apps.config.memory import machine_bytes

__all__ = ["colo_device_memory_capacity", "colo_get_cpu_memory_capacity", "colo_set_process_memory_fraction"]


def colo_device_memory_capacity(device: torch.device) -> int:
    """Return the bytes of a device's memory."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return machine_bytes()


def colo_get_cpu_memory_capacity() -> int:
    """Return the bytes of this host's memory."""
    return machine_bytes()


def colo_set_process_memory_fraction(ratio: float) -> None:
    """Let torch take a part of the GPU's memory only; on a CPU nothing is limited."""
    if torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(ratio)
