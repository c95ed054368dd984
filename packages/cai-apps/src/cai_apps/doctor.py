"""What this machine offers: versions, devices, backends, links and disk, each as (name, value) rows."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets")
COPY_BYTES = 256 * 2**20
DISK_BYTES = 64 * 2**20

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

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    rows = [("cpu", f"{len(os.sched_getaffinity(0))} cores, {memory / 2**30:.0f} GiB memory")]
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


def links() -> Rows:
    """Which GPUs reach each other's memory directly, and how fast each exchanges data with the host."""
    import torch

    count = torch.cuda.device_count()
    if count == 0:
        return [("gpu links", "no GPU")]
    rows = []
    for index in range(count):
        peers = [j for j in range(count) if j != index and torch.cuda.can_device_access_peer(index, j)]
        reach = f"reaches {len(peers)} of {count - 1} peers directly, " if count > 1 else ""
        rows.append((f"cuda:{index}", f"{reach}pinned host to device {_host_to_device(index):.1f} GB/s"))
    return rows


def _host_to_device(index: int) -> float:
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{index}")
    device.copy_(host)
    torch.cuda.synchronize(index)
    start = time.perf_counter()
    device.copy_(host)
    torch.cuda.synchronize(index)
    return COPY_BYTES / (time.perf_counter() - start) / 1e9


def kernels() -> Rows:
    """Which form of cai_kernels runs, and what attention would run at a usual shape."""
    import torch

    from cai_kernels import explain_attention, why_not_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reason = why_not_triton(device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q, kv = (torch.empty(1, heads, 128, 128, dtype=dtype, device=device) for heads in (32, 8))
    choice = explain_attention(q, kv, kv, causal=True)
    return [
        ("auto runs", "triton" if reason is None else f"plain torch: {reason}"),
        ("attention", f"{choice.backend}: {choice.reason}"),
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


SECTIONS: dict[str, Callable[[], Rows]] = {
    "versions": versions,
    "devices": devices,
    "backends": backends,
    "links": links,
    "kernels": kernels,
    "disk": lambda: disk(Path.cwd()),
}
