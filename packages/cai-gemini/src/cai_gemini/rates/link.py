"""Measures the link and the steps of host and device in a fraction of a second before training."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from cai_gemini.chunk.optimizer_step import DEVICE_BLOCK, HOST_BLOCK
from cai_gemini.memory.copies import Copies
from cai_gemini.memory.pinned import host_memory
from cai_gemini.memory.worker import Worker, leave_cores
from cai_gemini.planning.simulation import HOST_BYTES, Rates

COPY_BYTES = 2**28
STEP_ELEMENTS = 2**27  # 2 GB: caches of 300 MB make a tenth more of a quarter of that
REPEATS = 3


def measure(device: torch.device, worker: Worker | None = None) -> Rates:
    """Rates of `device`. On a CPU, which then plays the device, copies cost what host memory costs.

    worker: the worker in whose thread the host's rate is taken; None: one like it.
    """
    copies = Copies(device)
    numel = COPY_BYTES if device.type == "cuda" else COPY_BYTES // 16
    device_buffer = torch.empty(numel, dtype=torch.uint8, device=device)
    host_buffer, host_target = (host_memory(numel, torch.uint8, device) for _ in range(2))
    host_buffer.zero_()
    device_source = torch.empty_like(device_buffer)
    elements = STEP_ELEMENTS if device.type == "cuda" else STEP_ELEMENTS // 32

    def up() -> None:
        copies.to_device(device_buffer, host_buffer, copies.mark())

    def down() -> None:
        copies.to_host(host_target, device_source)

    def both() -> None:
        up()
        down()

    worker = worker or Worker("rates", device)
    return Rates(
        to_device=numel / _seconds(up, device),
        to_host=numel / _seconds(down, device),
        both=2 * numel / _seconds(both, device),
        host_step=_host_rate(elements, worker),
        device_step=_step_rate(device, elements // 8),
        host_beside=_host_rate(elements, worker, load=both) if device.type == "cuda" else None,
    )


def _host_rate(elements: int, worker: Worker, load: Callable[[], None] | None = None) -> float:
    """Return the rate of the host's steps, in the worker's thread, while `load` is called again and again."""
    if torch.cuda.is_available():
        leave_cores()
    rates: list[float] = []
    done = worker.submit(lambda: rates.append(_step_rate(torch.device("cpu"), elements)))
    while load is not None and not done.done():
        load()
        torch.cuda.synchronize()
    done.result()
    return rates[0]


def _seconds(call: Callable[[], None], device: torch.device) -> float:
    durations = []
    for _ in range(REPEATS + 1):
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        durations.append(time.perf_counter() - start)
    return min(durations[1:])


def _step_rate(device: torch.device, numel: int) -> float:
    """Bytes a second of AdamW in float32 with gradients and weights of two bytes, as `HOST_BYTES` a parameter.

    It runs over blocks as the steps of chunks do. numel: more than a processor's caches hold, or it is their speed.
    """
    block = min(DEVICE_BLOCK if device.type == "cuda" else HOST_BLOCK, numel)
    param, first, second = (torch.zeros(numel, device=device) for _ in range(3))
    grad, weights = (torch.zeros(numel, dtype=torch.bfloat16, device=device) for _ in range(2))
    step, scratch = torch.ones((), device=device), torch.empty(block, device=device)

    def call() -> None:
        for at in range(0, numel, block):
            part = slice(at, at + block)
            wide = scratch[: param[part].numel()].copy_(grad[part]).mul_(0.5)
            torch._fused_adamw_(
                [param[part]], [wide], [first[part]], [second[part]], [], [step],
                lr=1e-3, beta1=0.9, beta2=0.95, weight_decay=0.1, eps=1e-8, amsgrad=False, maximize=False,
            )  # fmt: skip
            weights[part].copy_(param[part])

    return HOST_BYTES * numel / _seconds(call, device)
