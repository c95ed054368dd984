"""What this machine offers: versions, devices, backends, links and disk, each as (name, value) rows."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from cai_apps.config.memory import machine_bytes
from cai_mesh.errors import CaiError

if TYPE_CHECKING:
    from cai_gemini.nvme import NvmeStore

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets")
DISK_BYTES = 64 * 2**20
REQUESTS = 4
"""Tensors of DISK_BYTES under way at once in the test of a directory for `memory.nvme`."""

Rows = list[tuple[str, str]]


def versions() -> Rows:
    rows = [("python", platform.python_version()), ("system", platform.platform())]
    for name in PACKAGES:
        try:
            rows.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            rows.append((name, "not installed"))
    return rows


def devices() -> Rows:
    import torch

    rows = [("cpu", f"{len(os.sched_getaffinity(0))} cores, {machine_bytes() / 2**30:.0f} GiB memory")]
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        kind = f"{device.name}, compute capability {device.major}.{device.minor}"
        rows.append((f"cuda:{index}", f"{kind}, {device.total_memory / 2**30:.0f} GiB memory"))
    return rows if len(rows) > 1 else [*rows, ("cuda", "no GPU that torch can use")]


def backends() -> Rows:
    import torch
    import torch.distributed as dist

    yes = {True: "available", False: "not available"}
    rows = [("gloo", yes[dist.is_gloo_available()]), ("nccl", yes[dist.is_nccl_available()])]
    if dist.is_nccl_available() and torch.cuda.is_available():
        rows[1] = ("nccl", ".".join(map(str, torch.cuda.nccl.version())))
    return [
        *rows,
        ("cuda of torch", torch.version.cuda or "none"),
        ("cpu threads", str(torch.get_num_threads())),
    ]


def memory() -> Rows:
    """What a model that is larger than its device has on the host: how much, how much may be locked, how fast."""
    import torch

    from cai_gemini.rates import measure

    available = next((line.split()[1] for line in _meminfo() if line.startswith("MemAvailable")), None)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rate = measure(torch.device("cpu")).host_step
    return [
        ("available", "unknown" if available is None else f"{int(available) / 2**20:.1f} GiB of host memory"),
        (
            "may be locked",
            "all" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB (ulimit -l)",
        ),
        ("AdamW", f"{rate / 1e9:.1f} GB/s with {torch.get_num_threads()} threads"),
    ]


def _meminfo() -> list[str]:
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []


def links() -> Rows:
    """Which GPUs reach each other's memory directly, and how fast each exchanges data with the host."""
    import torch

    from cai_gemini.rates import measure

    count = torch.cuda.device_count()
    if count == 0:
        return [("gpu links", "no GPU")]
    rows = []
    for index in range(count):
        peers = [j for j in range(count) if j != index and torch.cuda.can_device_access_peer(index, j)]
        reach = f"reaches {len(peers)} of {count - 1} peers directly, " if count > 1 else ""
        with torch.cuda.device(index):
            rates = measure(torch.device("cuda", index))
        speeds = (
            f"{rates.to_device / 1e9:.1f} GB/s, back {rates.to_host / 1e9:.1f}, both {rates.both / 1e9:.1f}"
        )
        rows.append((f"cuda:{index}", f"{reach}pinned host to device {speeds}"))
    return rows


def kernels() -> Rows:
    """Which form of cai_kernels runs, and what attention would run at a usual shape."""
    import torch

    from cai_kernels import explain_attention, why_not_packed, why_not_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_not_triton(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, kv = (torch.empty(1, heads, 128, 128, dtype=dtype, device=device) for heads in (32, 8))
    choice = explain_attention(q, kv, kv, causal=True)
    why_not_cudnn = why_not_packed(*(tensor[0].transpose(0, 1) for tensor in (q, kv, kv)))
    return [
        ("auto runs", "triton" if reason is None else f"plain torch: {reason}"),
        ("attention", f"{choice.backend}: {choice.reason}"),
        ("packed rows", "cudnn" if why_not_cudnn is None else f"without cuDNN: {why_not_cudnn}"),
    ]


def disk(directory: Path) -> Rows:
    """Free space, and the speed of one synced write."""
    free = shutil.disk_usage(directory).free
    block = os.urandom(DISK_BYTES)
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            start = time.perf_counter()
            file.write(block)
            file.flush()
            os.fsync(file.fileno())
            speed = f"{DISK_BYTES / (time.perf_counter() - start) / 1e9:.2f} GB/s synced write"
    except OSError as error:
        speed = f"not writable: {error.strerror}"
    return [(str(directory), f"{free / 2**30:.0f} GiB free, {speed}")]


def nvme(directory: Path) -> Rows:
    """How a directory would do as `memory.nvme`: what holds it, and the speed of large requests."""
    from cai_gemini.nvme import NvmeStore

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that it is memory is said below
            store = NvmeStore(directory)
        with store:
            writes, reads = _disk_rates(store)
            how = "past the page cache" if store.direct else "through the page cache"
            speed = f"{how}, writes {writes / 1e9:.2f} GB/s, reads {reads / 1e9:.2f} GB/s"
            kind = "memory, no disk" if store.in_memory else str(store.file_system)
    except CaiError as error:
        message = "; ".join(line.strip() for line in str(error).splitlines())
        return [(str(directory), f"does not do as memory.nvme: {message}")]
    return [(str(directory), f"{kind}, {speed}")]


def _disk_rates(store: NvmeStore) -> tuple[float, float]:
    import torch

    regions = [store.reserve(f"test {i}", DISK_BYTES, torch.uint8) for i in range(REQUESTS)]
    tensors = [store.buffer(DISK_BYTES, torch.uint8).random_() for _ in regions]
    rates = []
    for request in (store.write, store.read):
        start = time.perf_counter()
        for handle in [request(region, tensor) for region, tensor in zip(regions, tensors, strict=True)]:
            handle.wait()
        rates.append(REQUESTS * DISK_BYTES / (time.perf_counter() - start))
    return rates[0], rates[1]


SECTIONS: dict[str, Callable[[], Rows]] = {
    "versions": versions,
    "devices": devices,
    "backends": backends,
    "memory": memory,
    "links": links,
    "kernels": kernels,
    "disk": lambda: disk(Path.cwd()),
}
