"""What this machine's link and host memory do, measured in a fraction of a second before training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cai_gemini.copies import Copies
from cai_gemini.pinned import host_memory
from cai_gemini.simulate import HOST_BYTES, Rates

COPY_BYTES = 2**28
STEP_ELEMENTS = 2**24
REPEATS = 3


def measure(device: torch.device) -> Rates:
    """Rates of `device`. On a CPU, which then plays the device, copies cost what host memory costs."""
    copies = Copies(device)
    numel = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    here = torch.empty(numel, dtype=torch.uint8, device=device)
    there, other = (host_memory(numel, torch.uint8, device) for _ in range(2))
    there.zero_()
    also = torch.empty_like(here)

    def up() -> None:
        copies.to_device(here, there, copies.mark())

    def down() -> None:
        copies.to_host(other, also)

    def both() -> None:
        up()
        down()

    return Rates(
        to_device=numel / _seconds(up, device),
        to_host=numel / _seconds(down, device),
        both=2 * numel / _seconds(both, device),
        host_step=_step_rate(torch.device("cpu")),
        device_step=_step_rate(device),
    )


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    found = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])


def _step_rate(device: torch.device) -> float:
    """Bytes a second of AdamW in float32 with gradients and weights of two bytes, counted as `HOST_BYTES`."""
    numel = STEP_ELEMENTS if device.type == "cuda" else STEP_ELEMENTS // 4
    param, grad, first, second = (torch.zeros(numel, device=device) for _ in range(4))
    step = torch.ones((), device=device)

    def call() -> None:
        torch._fused_adamw_(
            [param], [grad], [first], [second], [], [step],
            lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    return HOST_BYTES * numel / _seconds(call, device)
