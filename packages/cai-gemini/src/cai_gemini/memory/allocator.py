"""Sets how torch's allocator takes device memory where little is left of it."""

from __future__ import annotations

import os

import torch

_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def expand_segments(device: torch.device, *, enabled: bool) -> bool:
    """Let memory that torch takes from now on be mapped page by page, if enabled and not configured by the user.

    Otherwise chunks, gradients and activations, which come and go in other sizes, leave holes: a tenth of a GPU that is
    used to its end. Returns whether it was done.
    """
    if not enabled or device.type != "cuda" or any(os.environ.get(name) for name in _VARIABLES):
        return False
    setting = "expandable_segments:True"
    new = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    (new or torch.cuda.memory._set_allocator_settings)(setting)
    return True


def let_go(device: torch.device) -> None:
    """Give memory that nobody uses back to the device, so that what comes next finds it in one piece."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
