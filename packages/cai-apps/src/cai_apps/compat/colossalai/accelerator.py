"""The device that a rank computes on, by the names of ColossalAI's accelerators."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from cai_apps.booster.launch import rank_device

__all__ = [
    "BaseAccelerator",
    "CpuAccelerator",
    "CudaAccelerator",
    "auto_set_accelerator",
    "get_accelerator",
    "set_accelerator",
]


class BaseAccelerator:
    """A kind of device. What torch's module of the kind has beside, such as streams, is an attribute here.

    Args:
        name: "cpu" or "cuda".
    """

    def __init__(self, name: str):
        self.name = name
        self.communication_backend = "nccl" if name == "cuda" else "gloo"
        self.is_synchronous = name == "cpu"
        self._torch: Any = torch.cuda if name == "cuda" else torch.cpu

    def get_current_device(self) -> torch.device:
        """Return this rank's device."""
        return (
            torch.device("cuda", torch.cuda.current_device()) if self.name == "cuda" else torch.device("cpu")
        )

    def current_device(self) -> int | str:
        """Return the number of this rank's device."""
        return self._torch.current_device()

    def is_available(self) -> bool:
        """Return whether there is such a device."""
        return self._torch.is_available()

    def synchronize(self, device: Any = None) -> None:
        """Wait for the device."""
        self._torch.synchronize(device)

    def manual_seed(self, seed: int) -> None:
        """Seed the device's random numbers."""
        if self.name == "cuda":
            torch.cuda.manual_seed(seed)
        else:
            torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def empty_cache(self) -> None:
        """Give back memory that torch keeps for later."""
        if self.name == "cuda":
            torch.cuda.empty_cache()

    def memory_allocated(self, device: Any = None) -> int:
        """Return the bytes of tensors on the device; 0 on a CPU, where nobody counts."""
        return torch.cuda.memory_allocated(device) if self.name == "cuda" else 0

    def max_memory_allocated(self, device: Any = None) -> int:
        """Return the most bytes of tensors that have been on the device."""
        return torch.cuda.max_memory_allocated(device) if self.name == "cuda" else 0

    def memory_reserved(self, device: Any = None) -> int:
        """Return the bytes that torch has of the device."""
        return torch.cuda.memory_reserved(device) if self.name == "cuda" else 0

    def max_memory_reserved(self, device: Any = None) -> int:
        """Return the most bytes that torch has had of the device."""
        return torch.cuda.max_memory_reserved(device) if self.name == "cuda" else 0

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Count the most bytes from now on."""
        if self.name == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def autocast(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> AbstractContextManager[Any]:
        """Return a context of torch's automatic mixed precision."""
        return torch.autocast(self.name, dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._torch, name)


class CudaAccelerator(BaseAccelerator):
    """GPUs."""

    def __init__(self) -> None:
        super().__init__("cuda")


class CpuAccelerator(BaseAccelerator):
    """The processor."""

    def __init__(self) -> None:
        super().__init__("cpu")


def get_accelerator() -> BaseAccelerator:
    """Return the kind of device that this rank computes on."""
    return CudaAccelerator() if rank_device().type == "cuda" else CpuAccelerator()


def set_accelerator(accelerator: Any) -> None:
    """Do nothing: `launch` chooses the device."""


def auto_set_accelerator() -> None:
    """Do nothing: `launch` chooses the device."""
