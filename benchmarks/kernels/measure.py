"""Time and memory of one form of an operation on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

WARM, CALLS, REPLAYS = 3, 4, 15
BUDGET_MS = 400.0  # of timed replays: long calls are replayed fewer times
CYCLED = 256 << 20  # bytes of inputs that a cache does not hold


def tensors(values: Any) -> list[torch.Tensor]:
    """Tensors in a result, at any depth of tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for value in values for t in tensors(value)] if isinstance(values, (tuple, list)) else []


def copies(inputs: tuple[Any, ...], count: int) -> list[tuple[Any, ...]]:
    """The inputs and copies of them, laid out alike: as many sets, up to `count`, as make `CYCLED` bytes."""
    size = sum(t.untyped_storage().nbytes() for t in tensors(inputs))
    count = min(count, -(-CYCLED // max(size, 1)))
    again = [
        tuple(
            v.detach().clone().requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
            for v in inputs
        )
        for _ in range(count - 1)
    ]
    return [inputs, *again]


class Form:
    """One form of a case: calls that can be timed. Calls take the sets of inputs in turn."""

    def __init__(self, fn: Callable, sets: list[tuple[Any, ...]]):
        self.fn, self.sets, self.turn = fn, sets, 0
        self.leaves = [[t for t in tensors(inputs) if t.requires_grad] for inputs in sets]
        with torch.no_grad():
            outputs = [o for o in tensors(fn(*sets[0])) if o.is_floating_point()]
        random = torch.Generator(device=tensors(sets[0])[0].device).manual_seed(1)
        self.upstream = [[_upstream(o, random) for o in outputs] for _ in sets]

    @property
    def differentiable(self) -> bool:
        return bool(self.leaves[0])

    def forward(self) -> list[torch.Tensor]:
        """Results of the next set of inputs."""
        self.turn = (self.turn + 1) % len(self.sets)
        return [o for o in tensors(self.fn(*self.sets[self.turn])) if o.is_floating_point()]

    def both(self) -> list[torch.Tensor]:
        """Results and gradients of the next set of inputs."""
        outputs = self.forward()
        pairs = [(o, g) for o, g in zip(outputs, self.upstream[self.turn], strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], self.leaves[self.turn], [g for _, g in pairs], allow_unused=True
        )
        return outputs + [g for g in found if g is not None]

    def given(self) -> list[torch.Tensor]:
        """All that was there before a call."""
        return [*tensors(self.sets), *tensors(self.upstream)]


def _upstream(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    if like.dim() == 0:
        return torch.ones_like(like)
    return torch.randn(like.shape, device=like.device, generator=random).to(like.dtype)


def device_ms(call: Callable, device: torch.device) -> tuple[float, str]:
    """(median time of a call on the device, how): a CUDA graph of several calls, or events around several of them."""
    for _ in range(WARM):
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start), "host clock"
    torch.cuda.synchronize()
    if waits(call):
        run, how = (lambda: [call() for _ in range(CALLS)] and None), "events"
    else:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        run, how = graph.replay, "graph"
    first = _elapsed(run)
    replays = max(min(REPLAYS, int(BUDGET_MS / max(first, 1e-3))), 3)
    return statistics.median(_elapsed(run) for _ in range(replays)) / CALLS, how


def waits(call: Callable) -> bool:
    """Whether a call makes the host wait for the device: a graph cannot hold it, and a capture that fails breaks
    torch's random generator for the process."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _elapsed(run: Callable) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def host_us(call: Callable, device: torch.device) -> float:
    """Time a call keeps the host, with the device idle at its start."""
    found = []
    for _ in range(REPLAYS):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def extra_bytes(call: Callable, given: list[torch.Tensor], device: torch.device) -> int | None:
    """Peak memory of a call beyond what was there and the results that are new; each storage counts once."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    old = {t.untyped_storage().data_ptr() for t in given}
    new = {r.untyped_storage().data_ptr(): r.untyped_storage().nbytes() for r in results}
    kept = sum(size for address, size in new.items() if address not in old)
    return torch.cuda.max_memory_allocated() - before - kept


def seconds(call: Callable, device: torch.device) -> float:
    """Wall time of one call until the device is done: of a first call, the compilation."""
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(fn: Callable, sets: list[tuple[Any, ...]], device: torch.device) -> dict[str, Any]:
    """Times in ms, host times in us, memory in bytes, of forward without gradients and of forward with backward."""
    row: dict[str, Any] = {}
    start = time.perf_counter()
    form = Form(fn, sets)
    call = form.both if form.differentiable else form.forward
    row["first_call_s"] = time.perf_counter() - start + seconds(call, device)
    with torch.no_grad():
        row["forward_ms"], row["timed_by"] = device_ms(form.forward, device)
        row["host_forward_us"] = host_us(form.forward, device)
    row["extra_bytes"] = extra_bytes(call, form.given(), device)
    row["host_us"] = host_us(call, device)
    if form.differentiable:
        row["both_ms"], row["timed_by"] = device_ms(form.both, device)
        row["backward_ms"] = row["both_ms"] - row["forward_ms"]
    return row


def copy_gbs(device: torch.device) -> float:
    """Bytes read and written by a large copy, a second, in 1e9: the best of torch's copy and of a kernel's."""
    source = torch.randn(1 << (30 if device.type == "cuda" else 20), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)

    def kernel() -> torch.Tensor:
        return torch.mul(source, 1.0, out=target)

    def plain() -> torch.Tensor:
        return target.copy_(source)

    if device.type == "cuda":  # a device at rest takes a while to reach its clocks
        for _ in range(200):
            kernel()
    best = min(device_ms(kernel, device)[0], device_ms(plain, device)[0])
    return 2 * source.nbytes / best / 1e6
