"""The thread that runs backward on a GPU, before its first work."""

from __future__ import annotations

import torch


def open_backward(device: torch.device) -> None:
    """Let the thread that runs backward on a GPU meet the GPU's context; nothing on other devices.

    A stage's backward may begin with a product of matrices, and cuBLAS warns of a thread that has no context yet.
    """
    if device.type == "cuda":
        with torch.enable_grad():
            torch.zeros(1, device=device, requires_grad=True).add(1).backward()
