"""What this machine offers: versions, devices, backends, links and disk, each as facts with a mark and advice."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cai_apps.config.memory import machine_bytes
from cai_mesh.errors import CaiError

if TYPE_CHECKING:
    from cai_gemini.nvme import NvmeStore

PACKAGES = ("torch", "triton", "transformers", "tokenizers", "safetensors", "numpy", "datasets")
DISK_BYTES = 64 * 2**20
REQUESTS = 4
"""Tensors of DISK_BYTES under way at once in the test of a directory for `memory.nvme`."""

OLDEST = {"torch": (2, 11), "transformers": (5,)}
"""Releases that cai needs."""
TRITON = (8, 0)
"""Compute capability from which on kernels are Triton's."""
DRIVER = Path("/proc/driver/nvidia/version")
"""The file of the NVIDIA driver, which is there whatever torch was built for."""
ROOM, SHARED = 5 * 2**30, 2**30
"""Bytes of a disk for runs, and of /dev/shm for ranks, below which a machine may be too small."""

Mark = Literal["green", "yellow", "red"]


@dataclass(frozen=True)
class Fact:
    """One thing about this machine.

    Args:
        name: the name of the thing.
        value: a phrase.
        mark: green: good. yellow: works, but slowly or not for everything. red: has to be mended. None: neither.
        advice: a sentence on what to do, of what is yellow or red.
    """

    name: str
    value: str
    mark: Mark | None = None
    advice: str = ""


Facts = list[Fact]


def versions() -> Facts:
    facts = [Fact("python", platform.python_version()), Fact("system", platform.platform())]
    for name in PACKAGES:
        try:
            facts.append(_version(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            facts.append(Fact(name, "not installed"))
    return facts


def _version(name: str, version: str) -> Fact:
    oldest = OLDEST.get(name)
    if oldest is None:
        return Fact(name, version)
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[: len(oldest)])
    if numbers >= oldest:
        return Fact(name, version, "green")
    needed = ".".join(map(str, oldest))
    return Fact(name, version, "red", f"cai needs {name} {needed} or newer: pip install -U {name}")


def devices() -> Facts:
    import torch

    cpu = Fact("cpu", f"{len(os.sched_getaffinity(0))} cores, {machine_bytes() / 2**30:.0f} GiB memory")
    gpus = [_gpu(index) for index in range(torch.cuda.device_count())]
    return [cpu, *(gpus or [_no_gpu()])]


def _gpu(index: int) -> Fact:
    import torch

    device = torch.cuda.get_device_properties(index)
    kind = f"{device.name}, compute capability {device.major}.{device.minor}"
    value = f"{kind}, {device.total_memory / 2**30:.0f} GiB memory"
    if (device.major, device.minor) >= TRITON:
        return Fact(f"cuda:{index}", value, "green")
    return Fact(
        f"cuda:{index}", value, "yellow", "kernels run in plain torch below compute capability 8.0: slower"
    )


def _no_gpu() -> Fact:
    import torch

    if not DRIVER.exists():
        advice = "training runs on the CPU: right for recipes whose name ends in -tiny, too slow for others"
        return Fact("cuda", "no GPU that torch can use", "yellow", advice)
    if torch.version.cuda is None:
        advice = "this torch was built without CUDA, and the machine has an NVIDIA driver: install a GPU build of torch"
    elif os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        advice = "CUDA_VISIBLE_DEVICES hides the GPUs: unset it"
    else:
        advice = f"torch is built for CUDA {torch.version.cuda}; nvidia-smi says which CUDA the driver knows: update it"
    return Fact("cuda", "a driver, and no GPU that torch can use", "red", advice)


def backends() -> Facts:
    import torch
    import torch.distributed as dist

    several = torch.cuda.device_count() > 1
    gloo = Fact("gloo", "available", "green")
    if not dist.is_gloo_available():
        gloo = Fact(
            "gloo", "not available", "red", "ranks cannot start without it: install another build of torch"
        )
    nccl = Fact("nccl", "not available")
    if dist.is_nccl_available() and torch.cuda.is_available():
        nccl = Fact("nccl", ".".join(map(str, torch.cuda.nccl.version())), "green")
    elif several:
        nccl = Fact(
            "nccl", "not available", "red", "several GPUs need it: install a GPU build of torch for Linux"
        )
    return [
        gloo,
        nccl,
        Fact("cuda of torch", torch.version.cuda or "none"),
        Fact("cpu threads", str(torch.get_num_threads())),
        _shared_memory(several),
    ]


def _shared_memory(several: bool) -> Fact:
    """Return how large /dev/shm is, through which the ranks of one machine exchange data."""
    try:
        size = shutil.disk_usage("/dev/shm").total
    except OSError:
        return Fact("shared memory", "no /dev/shm", "yellow", "ranks of one machine may fail to start")
    value = f"{size / 2**30:.1f} GiB in /dev/shm"
    if size >= SHARED or not several:
        return Fact("shared memory", value, "green" if size >= SHARED else None)
    return Fact(
        "shared memory", value, "yellow", "NCCL may run out of it: docker run --shm-size 8g, or --ipc=host"
    )


def memory() -> Facts:
    """What a model that is larger than its device has on the host: how much, how much may be locked, how fast."""
    import torch

    from cai_gemini.rates import measure

    available = next((line.split()[1] for line in _meminfo() if line.startswith("MemAvailable")), None)
    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    rate = measure(torch.device("cpu")).host_step
    return [
        Fact(
            "available",
            "unknown" if available is None else f"{int(available) / 2**20:.1f} GiB of host memory",
        ),
        Fact(
            "may be locked",
            "all" if locked == resource.RLIM_INFINITY else f"{locked / 2**20:.0f} MiB (ulimit -l)",
        ),
        Fact("AdamW", f"{rate / 1e9:.1f} GB/s with {torch.get_num_threads()} threads"),
    ]


def _meminfo() -> list[str]:
    try:
        return Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return []


def links() -> Facts:
    """Which GPUs reach each other's memory directly, and how fast each exchanges data with the host."""
    import torch

    from cai_gemini.rates import measure

    count = torch.cuda.device_count()
    if count == 0:
        return [Fact("gpu links", "no GPU")]
    facts = []
    for index in range(count):
        peers = [j for j in range(count) if j != index and torch.cuda.can_device_access_peer(index, j)]
        reach = f"reaches {len(peers)} of {count - 1} peers directly, " if count > 1 else ""
        with torch.cuda.device(index):
            rates = measure(torch.device("cuda", index))
        speeds = (
            f"{rates.to_device / 1e9:.1f} GB/s, back {rates.to_host / 1e9:.1f}, both {rates.both / 1e9:.1f}"
        )
        value = f"{reach}pinned host to device {speeds}"
        facts.append(_link(f"cuda:{index}", value, reaches_all=len(peers) == count - 1))
    return facts


def _link(name: str, value: str, *, reaches_all: bool) -> Fact:
    if reaches_all:
        return Fact(name, value, "green")
    advice = "some GPUs reach each other through the host alone: tensor parallelism over them is slow"
    return Fact(name, value, "yellow", advice)


def kernels() -> Facts:
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
        _auto(reason, on_gpu=device.type == "cuda"),
        Fact("attention", f"{choice.backend}: {choice.reason}"),
        Fact("packed rows", "cudnn" if why_not_cudnn is None else f"without cuDNN: {why_not_cudnn}"),
    ]


def _auto(reason: str | None, *, on_gpu: bool) -> Fact:
    if reason is None:
        return Fact("auto runs", "triton", "green")
    if not on_gpu:
        return Fact("auto runs", f"plain torch: {reason}")
    advice = (
        "training is slower and takes more memory: pip install 'cai-kernels[triton]' if Triton is missing"
    )
    return Fact("auto runs", f"plain torch: {reason}", "yellow", advice)


def disk(directory: Path) -> Facts:
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
        advice = "runs are written below the directory you are in: go to another one, or set log.directory"
        return [Fact(str(directory), f"not writable: {error.strerror}", "red", advice)]
    value = f"{free / 2**30:.0f} GiB free, {speed}"
    if free >= ROOM:
        return [Fact(str(directory), value, "green")]
    advice = (
        "a checkpoint takes 12 bytes a parameter, and two are kept: choose a larger disk as log.directory"
    )
    return [Fact(str(directory), value, "yellow", advice)]


def nvme(directory: Path) -> Facts:
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
        return [
            Fact(str(directory), f"does not do as memory.nvme: {message}", "red", "choose another directory")
        ]
    if store.in_memory:
        return [Fact(str(directory), f"{kind}, {speed}", "yellow", "it takes the memory that it is to spare")]
    return [Fact(str(directory), f"{kind}, {speed}", "green")]


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


SECTIONS: dict[str, Callable[[], Facts]] = {
    "versions": versions,
    "devices": devices,
    "backends": backends,
    "memory": memory,
    "links": links,
    "kernels": kernels,
    "disk": lambda: disk(Path.cwd()),
}
