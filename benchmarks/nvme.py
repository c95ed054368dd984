"""GB/s to and from a disk: `cai_gemini.nvme` by block size, threads and path, beside torch.save and kvikio.

    python benchmarks/nvme.py --directory /mnt/nvme --gib 4 --json nvme.json

Each line writes and reads a tensor of random bytes (a megabyte, repeated), `--repeats` times, and reports the median.
"direct" goes past the page cache; what goes through it may be memory's speed, so those lines end each write with
fdatasync and drop the file's pages before each read. kvikio is measured where it is installed, with host memory, as the
store is used. The last lines are the loop of an optimizer over state on disk: read three tensors a chunk, AdamW, write
them back.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch.optim.adamw import adamw

from cai_gemini.nvme import NvmeStore, Region, Syscalls, stream

MIB = 1 << 20


class Descriptors(Syscalls):
    """Remembers the open file, to drop its pages from the cache."""

    descriptor = -1

    def open(self, path: str, flags: int) -> int:
        self.descriptor = super().open(path, flags)
        return self.descriptor


def randomize(data: torch.Tensor) -> torch.Tensor:
    """Fill bytes with one random megabyte over and over: a generator is slower than a disk."""
    once = torch.empty(min(MIB, data.numel()), dtype=torch.uint8).random_()
    for piece in data.split(once.numel()):
        piece.copy_(once[: piece.numel()])
    return data


def drop(descriptor: int) -> None:
    """Write a file's pages to the disk and forget them."""
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def median(action: Callable[[], object], repeats: int, before: Callable[[], object] = lambda: None) -> float:
    """Seconds of `action`, without those of `before`; the median of `repeats`."""
    seconds = []
    for _ in range(repeats):
        before()
        began = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def of_store(options: argparse.Namespace, block: int, threads: int, direct: bool, checksums: bool) -> dict:
    """One configuration of the store."""
    system = Descriptors()
    size = int(options.gib * (1 << 30)) // block * block
    with NvmeStore(
        options.directory,
        block_bytes=block,
        threads=threads,
        direct=direct,
        checksums=checksums,
        syscalls=system,
        timeout=600,
    ) as store:
        region, data = store.reserve("data", size, torch.uint8), store.buffer(size, torch.uint8)
        randomize(data)

        def write() -> None:
            store.write(region, data).wait()
            if not direct:
                os.fdatasync(system.descriptor)

        write()  # the first write of preallocated space also records that it is used
        wrote = median(write, options.repeats)
        read = median(
            lambda: store.read(region, data).wait(),
            options.repeats,
            before=lambda: None if direct else drop(system.descriptor),
        )
    name = f"store, {'direct' if direct else 'page cache'}{'' if checksums else ', no checksums'}"
    return row(name, size, wrote, read, block, threads)


def row(name: str, size: int, wrote: float, read: float, block: int = 0, threads: int = 0) -> dict:
    """A line of the result."""
    return {
        "form": name,
        "block_mib": block / MIB,
        "threads": threads,
        "write_gbs": size / wrote / 1e9,
        "read_gbs": size / read / 1e9,
    }


def of_torch_save(options: argparse.Namespace) -> dict:
    """torch.save and torch.load of the same bytes, with what makes them comparable."""
    path = Path(options.directory) / f"bench-{os.getpid()}.pt"
    size = int(options.gib * (1 << 30))
    data = randomize(torch.empty(size, dtype=torch.uint8))

    def write() -> None:
        with path.open("wb") as file:
            torch.save(data, file)
            file.flush()
            os.fdatasync(file.fileno())

    def forget() -> None:
        with path.open("rb") as file:
            drop(file.fileno())

    try:
        wrote = median(write, options.repeats)
        read = median(lambda: torch.load(path, weights_only=True), options.repeats, before=forget)
    finally:
        path.unlink(missing_ok=True)
    return row("torch.save / torch.load, fdatasync", size, wrote, read)


def of_kvikio(options: argparse.Namespace, threads: int, direct: bool) -> dict | None:
    """kvikio with host memory; None where it cannot run."""
    try:
        import kvikio
        import kvikio.defaults
    except Exception as error:
        print(f"kvikio: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    path = Path(options.directory) / f"bench-{os.getpid()}.kvikio"
    size = int(options.gib * (1 << 30))
    settings = {"num_threads": threads, "task_size": options.block_mib[-1] * MIB}
    settings |= {"auto_direct_io_read": direct, "auto_direct_io_write": direct}
    with NvmeStore(options.directory) as store:
        data = randomize(store.buffer(size, torch.uint8))
    array = data.numpy()

    def transfer(flags: str) -> None:
        with kvikio.CuFile(str(path), flags) as file:
            (file.pread if flags == "r" else file.pwrite)(array).get()
        if flags != "r" and not direct:
            descriptor = os.open(path, os.O_RDWR)
            os.fdatasync(descriptor)
            os.close(descriptor)

    def forget() -> None:
        with path.open("rb") as file:
            drop(file.fileno())

    try:
        kvikio.defaults.set(settings)
        transfer("w")
        wrote = median(lambda: transfer("r+"), options.repeats)
        read = median(lambda: transfer("r"), options.repeats, before=forget)
    except RuntimeError as error:
        print(f"kvikio: {error}", file=sys.stderr)
        return None
    finally:
        path.unlink(missing_ok=True)
    name = f"kvikio {kvikio.__version__}, {'direct' if direct else 'page cache'}"
    return row(name, size, wrote, read, options.block_mib[-1] * MIB, threads)


def of_optimizer(options: argparse.Namespace, buffers: int) -> dict:
    """AdamW over master weights and two moments on disk: bytes read and written a second."""
    block, threads = options.block_mib[-1] * MIB, options.threads[-1]
    numel = options.chunk_mib * MIB // 4
    count = max(2, int(options.gib * (1 << 30)) // (3 * 4 * numel))
    gradient, at = torch.randn(numel), torch.tensor(1.0)

    def update(_: int, tensors: list[torch.Tensor]) -> None:
        p, m, v = tensors
        adamw(
            *([p], [gradient], [m], [v], [], [at]),
            fused=True,
            amsgrad=False,
            beta1=0.9,
            beta2=0.999,
            lr=1e-3,
            weight_decay=0.1,
            eps=1e-8,
            maximize=False,
        )

    tensors = [torch.zeros(numel) for _ in range(3)]
    compute = median(lambda: update(0, tensors), options.repeats) * count
    with NvmeStore(options.directory, block_bytes=block, threads=threads, timeout=600) as store:
        chunks: list[list[Region]] = [
            [store.reserve(f"{i}.{kind}", numel, torch.float32, zeros=True) for kind in ("p", "m", "v")]
            for i in range(count)
        ]
        stream(store, chunks, update, buffers=buffers)
        took = median(lambda: stream(store, chunks, update, buffers=buffers), options.repeats)
    size = count * 3 * 4 * numel
    return {
        "form": f"AdamW over state on disk, {buffers} buffers",
        "block_mib": options.block_mib[-1],
        "threads": threads,
        "both_gbs": 2 * size / took / 1e9,
        "parameters_per_second": count * numel / took,
        "seconds": took,
        "adamw_alone_seconds": compute,
    }


def machine(options: argparse.Namespace) -> dict:
    """Where and with what this ran."""
    with NvmeStore(options.directory) as store:
        disk = {"file_system": str(store.file_system), "direct": store.direct, "alignment": store.alignment}
    data = bytes(os.urandom(1 << 16)) * 128
    crc = len(data) / median(lambda: zlib.crc32(data), 5) / 1e9
    return {
        "command": " ".join(["python", "benchmarks/nvme.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "crc32_gbs_a_thread": crc,
        **disk,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", default=".")
    parser.add_argument("--gib", type=float, default=1.0, help="bytes of each line")
    parser.add_argument("--block-mib", type=int, nargs="+", default=[1, 4, 16, 8])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 16, 8])
    parser.add_argument("--chunk-mib", type=int, default=64, help="of one tensor of the optimizer's loop")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found, rows = machine(options), []
    print("the last of --block-mib and of --threads is used where the other varies\n")
    print(json.dumps(found, indent=1))
    print("\n| form | block MiB | threads | write GB/s | read GB/s |\n|---|---|---|---|---|", flush=True)

    def show(line: dict | None) -> None:
        if line is not None:
            rows.append(line)
            cells = [line.get("write_gbs"), line.get("read_gbs")]
            if "both_gbs" in line:
                cells = [line["both_gbs"], f"both; AdamW alone takes {line['adamw_alone_seconds']:.2f} s of"]
                cells[1] += f" {line['seconds']:.2f} s"
            text = [f"{c:.2f}" if isinstance(c, float) else str(c) for c in cells]
            print(
                f"| {line['form']} | {line['block_mib']:g} | {line['threads']} | {' | '.join(text)} |",
                flush=True,
            )

    block, threads = options.block_mib[-1] * MIB, options.threads[-1]
    for direct in (True, False) if found["direct"] else (False,):
        pairs = {(size * MIB, threads): None for size in options.block_mib}
        pairs |= {(block, count): None for count in options.threads}
        for size, count in pairs:
            show(of_store(options, size, count, direct, checksums=True))
        show(of_store(options, block, threads, direct, checksums=False))
        show(of_kvikio(options, threads, direct))
    show(of_torch_save(options))
    for buffers in (2, 3):
        show(of_optimizer(options, buffers))
    if options.json:
        options.json.write_text(json.dumps({"machine": found, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
