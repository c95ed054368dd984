"""`cai train` as shipped, for some steps: what it counts a second and GPU, peak memory, and the gaps of a trace.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/shipped.py --out row.jsonl train llama-8b

It counts tokens, images or chains. Steps are those of metrics.jsonl; after them each rank traces some more and writes
a row, and the run is killed. A gap is time in which no kernel and no copy runs on the rank's GPU. Works on any version
of cai whose metrics have `step_seconds`, with all ranks on one host.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch
from overlap import length, union
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--warmup", type=int, default=4, help="steps that are not counted")
    parser.add_argument("--steps", type=int, default=8, help="steps whose median counts")
    parser.add_argument("--traced", type=int, default=3, help="steps of the trace; 0: none")
    parser.add_argument(
        "--timeline", type=Path, help="write a step of rank 0, host and GPU, for chrome://tracing"
    )
    parser.add_argument("--form", default="", help="name of this run in the output")
    parser.add_argument("--out", type=Path, help="file to append to")
    parser.add_argument(
        "--drawn", action="store_true", help="draw pretrained weights on the device in place of reading them"
    )
    parser.add_argument("cai", nargs=argparse.REMAINDER, help="train RECIPE [--section.key value]")
    return parser.parse_args()


def records(metrics: Path) -> list[dict]:
    if not metrics.exists():
        return []
    return [json.loads(line) for line in metrics.read_text().splitlines(keepends=True) if line.endswith("\n")]


def wait_for(metrics: Path, steps: int) -> list[dict]:
    """The records, once there are so many."""
    while len(found := records(metrics)) < steps:
        time.sleep(0.02)
    return found


def is_communication(name: str) -> bool:
    return any(part in name for part in ("nccl", "barrier_kernel", "PtoP"))


def gaps(trace: profile) -> dict:
    """Of the time from the first kernel's start to the last one's end: idle, and communication alone."""
    events = trace.profiler.kineto_results.events()
    on_gpu = [e for e in events if e.device_type() == torch.autograd.DeviceType.CUDA]
    spans = {e: (e.start_ns(), e.start_ns() + e.duration_ns()) for e in on_gpu}
    if not spans:
        return {}
    busy = union(list(spans.values()))
    compute = union([span for event, span in spans.items() if not is_communication(event.name())])
    whole = busy[-1][1] - busy[0][0]
    names: Counter[str] = Counter()
    for event in on_gpu:
        names[event.name()[:60]] += event.duration_ns()

    exposed = sorted(((after[0] - before[1], after[0]) for before, after in pairwise(compute)), reverse=True)
    starts = {
        span[0]: event.name()[:60] for event, span in spans.items() if not is_communication(event.name())
    }
    idle: Counter[str] = Counter()
    first = {span[0]: event.name()[:60] for event, span in spans.items()}
    for before, after in pairwise(busy):
        idle[first[after[0]]] += after[0] - before[1]
    return {
        "gap_share": round(1 - length(busy) / whole, 5),
        "gaps_before_ms": {name: round(ns / 1e6, 2) for name, ns in idle.most_common(12)},
        "longest_gap_ms": round(max((b[0] - a[1] for a, b in pairwise(busy)), default=0) / 1e6, 3),
        "communication_alone_share": round((length(busy) - length(compute)) / whole, 5),
        "longest_alone_ms": [[round(ns / 1e6, 2), starts[at]] for ns, at in exposed[:10]],
        "traced_seconds": round(whole / 1e9, 3),
        "events": len(spans),
        "longest_kernels_ms": {name: round(ns / 1e6, 1) for name, ns in names.most_common(25)},
    }


def write_timeline(path: Path, steps: Callable[[], object]) -> None:
    threads = _ExperimentalConfig(profile_all_threads=True)
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA] if torch.cuda.is_available() else None
    with profile(activities=activities, record_shapes=True, experimental_config=threads) as trace:
        steps()
    trace.export_chrome_trace(str(path))


def observe(options: argparse.Namespace, directory: Path) -> None:
    metrics = directory / "metrics.jsonl"
    found = wait_for(metrics, options.warmup + options.steps)
    row = {"form": options.form, "command": " ".join(["cai", *options.cai]), "torch": torch.__version__}
    ranks = int(os.environ["WORLD_SIZE"])
    rank = int(os.environ["RANK"])
    timed = found[options.warmup :]
    seconds = statistics.median(record["step_seconds"] for record in timed)
    counted = next(name for name in timed[-1] if f"{name}_per_second" in timed[-1])  # tokens, images, chains
    count = timed[-1][counted] - timed[-2][counted]
    row |= {
        "rank": rank,
        "ranks": ranks,
        f"{counted}_per_second_per_gpu": round(count / seconds / ranks, 1),
        "step_seconds": round(seconds, 4),
        "peak_gib": round(max(record["memory_bytes"] for record in found) / 2**30, 2),
        "losses": [round(record["loss"], 4) for record in found],
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    if options.traced and torch.cuda.is_available():
        with profile(activities=[ProfilerActivity.CUDA]) as trace:
            wait_for(metrics, len(found) + options.traced)
        row |= gaps(trace)
    if options.timeline and rank == 0:
        write_timeline(options.timeline, lambda: wait_for(metrics, len(records(metrics)) + 2))
    print(json.dumps(row), flush=True)
    if options.out:
        with options.out.open("a") as file:
            file.write(json.dumps(row) + "\n")
    time.sleep(3)  # the other ranks write theirs
    if rank == 0:
        shutil.rmtree(directory, ignore_errors=True)
    os.kill(os.getpid(), signal.SIGKILL)  # a run that is asked to stop would save first


def draw_weights() -> None:
    """Let what is read from files of weights be drawn in place: folders of 140 GB need not be there to be trained."""
    from cai_apps.applications.language import weights

    def reader(_name: str, _directory: Callable[[], Path]) -> Callable:
        def read(model: torch.nn.Module, chosen: Callable[[str], bool]) -> None:
            for name, param in model.named_parameters():
                if chosen(name) and param.ndim > 1 and "lora" not in name:
                    param.data.normal_(std=0.02)
                elif chosen(name) and "lora" not in name:
                    param.data.fill_(1.0)

        return read

    weights.reader = reader


def main() -> None:
    options = arguments()
    shared = (
        Path(tempfile.gettempdir()) / f"shipped-{os.getppid()}"
    )  # of this launch: no metrics of another run
    threading.Thread(target=observe, args=(options, shared), daemon=True).start()
    if options.drawn:
        draw_weights()
    from cai_apps.cli import main as cai

    sys.argv = ["cai", *options.cai, "--log.directory", str(shared)]
    sys.exit(cai())


if __name__ == "__main__":
    main()
