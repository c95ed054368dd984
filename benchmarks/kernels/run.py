"""Every kernel beside plain torch, torch.compile and Liger-Kernel, in one run.

    python benchmarks/kernels/run.py [--only rms_norm,rope] [--forms ours,eager,compile,liger] [--out FILE] [--tiny]

Device time is the median replay of a CUDA graph of several calls, so the host launches do not count; what they
cost is the host column: time a call of forward and backward takes before the device is done. Extra memory is the peak
beyond inputs, results and gradients. Inputs are random; `GB/s` counts the bytes that must move. `--tiny` runs small
shapes on any device, to see that it works.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

from case import Case  # noqa: E402

TIMED, CALLS, WARM = 15, 4, 3


def files(only: list[str]) -> Iterator[Any]:
    for path in sorted(HERE.glob("*.py")):
        if path.stem in ("run", "case") or (only and path.stem not in only):
            continue
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


def tensors(values: Any) -> list[torch.Tensor]:
    """Tensors in a result, at any depth of tuples."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [t for value in values for t in tensors(value)] if isinstance(values, (tuple, list)) else []


class Form:
    """One form of a case on its inputs: calls that can be timed."""

    def __init__(self, fn: Callable, inputs: tuple[Any, ...]):
        self.fn, self.inputs = fn, inputs
        self.leaves = [t for t in tensors(inputs) if t.requires_grad]
        with torch.no_grad():
            outputs = [o for o in tensors(fn(*inputs)) if o.is_floating_point()]
        random = torch.Generator(device=tensors(inputs)[0].device).manual_seed(1)
        self.upstream = [torch.ones_like(o) if o.dim() == 0 else _normal(o, random) for o in outputs]

    def forward(self) -> list[torch.Tensor]:
        return [o for o in tensors(self.fn(*self.inputs)) if o.is_floating_point()]

    def both(self) -> list[torch.Tensor]:
        outputs = self.forward()
        pairs = [(o, g) for o, g in zip(outputs, self.upstream, strict=True) if o.requires_grad]
        found = torch.autograd.grad(
            [o for o, _ in pairs], self.leaves, [g for _, g in pairs], allow_unused=True
        )
        return outputs + [g for g in found if g is not None]


def _normal(like: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    return torch.randn(like.shape, device=like.device, generator=random).to(like.dtype)


def device_ms(call: Callable, device: torch.device) -> float:
    """Median time of a call on the device; by a graph of several calls, or by events where it cannot be captured."""
    for _ in range(WARM):
        call()
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    torch.cuda.synchronize()
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(CALLS):
                call()
        run, calls = graph.replay, CALLS
    except Exception:
        torch.cuda.synchronize()
        run, calls = call, 1
    run()
    found = []
    for _ in range(TIMED):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        end.synchronize()
        found.append(start.elapsed_time(end) / calls)
    return statistics.median(found)


def host_us(call: Callable, device: torch.device) -> float:
    """Time a call keeps the host, with the device idle at its start."""
    found = []
    for _ in range(TIMED):
        if device.type == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        found.append(1e6 * (time.perf_counter() - start))
    return statistics.median(found)


def extra_bytes(call: Callable, device: torch.device) -> int | None:
    """Peak memory of a call beyond what it returns."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results = call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before - sum(r.untyped_storage().nbytes() for r in results)


def first_call_seconds(call: Callable, device: torch.device) -> float:
    start = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def forms(case: Case, wanted: list[str]) -> Iterator[tuple[str, Callable]]:
    if "ours" in wanted:
        yield "ours", case.ours
    if "eager" in wanted:
        yield "eager", case.eager
    if "compile" in wanted:
        torch._dynamo.reset()
        yield "compile", torch.compile(case.eager, dynamic=False)
    if "liger" in wanted and case.liger is not None:
        yield "liger", case.liger()


def measure(
    case: Case, name: str, fn: Callable, inputs: tuple[Any, ...], device: torch.device
) -> dict[str, Any]:
    row: dict[str, Any] = {"op": case.op, "shape": case.shape, "form": name}
    form = Form(fn, inputs)
    differentiable = bool(form.leaves)
    call = form.both if differentiable else form.forward
    row["first_call_s"] = first_call_seconds(call, device)
    with torch.no_grad():
        row["forward_ms"] = device_ms(form.forward, device)
    row["extra_bytes"] = extra_bytes(call, device)
    row["host_us"] = host_us(call, device)
    if differentiable:
        row["both_ms"] = device_ms(form.both, device)
        row["backward_ms"] = row["both_ms"] - row["forward_ms"]
    for part in ("forward", "backward"):
        moved, flops = getattr(case, f"{part}_bytes"), getattr(case, f"{part}_flops")
        if f"{part}_ms" in row and row[f"{part}_ms"] > 0:
            row[f"{part}_gbs"] = moved / row[f"{part}_ms"] / 1e6
            row[f"{part}_tflops"] = flops / row[f"{part}_ms"] / 1e9
    return row


def copy_gbs(device: torch.device) -> float:
    """Bytes read and written by a large copy, a second."""
    source = torch.randn(1 << (30 if device.type == "cuda" else 20), device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / device_ms(lambda: target.copy_(source), device) / 1e6


def line(row: dict[str, Any], copy: float) -> str:
    if "error" in row:
        return f"{row['op']:<22}{row['shape']:<26}{row['form']:<8} {row['error']}"
    share = " ".join(
        f"{part[0]} {row[f'{part}_gbs'] / copy:4.0%}"
        for part in ("forward", "backward")
        if row.get(f"{part}_gbs")
    )
    extra = "" if row["extra_bytes"] is None else f"{row['extra_bytes'] / 1e9:8.3f} GB"
    both = f"{row['both_ms']:9.3f}" if "both_ms" in row else " " * 9
    return (
        f"{row['op']:<22}{row['shape']:<26}{row['form']:<8}{row['forward_ms']:9.3f}{both} ms  {share:<16}{extra}"
        f"{row['host_us']:8.0f} us host"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="files of this folder, by comma")
    parser.add_argument("--forms", default="ours,eager,compile,liger")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    copy, rows = copy_gbs(device), []
    print(f"copy: {copy:.0f} GB/s")
    for module in files([name for name in options.only.split(",") if name]):
        for case in module.cases(options.tiny):
            inputs = case.make(device)
            for name, fn in forms(case, options.forms.split(",")):
                try:
                    row = measure(case, name, fn, inputs, device)
                except Exception as error:
                    row = {"op": case.op, "shape": case.shape, "form": name, "error": repr(error)[:300]}
                rows.append(row)
                print(line(row, copy), flush=True)
            del inputs
            if device.type == "cuda":
                torch.cuda.empty_cache()
    if options.out:
        options.out.write_text(json.dumps(record(copy, rows, device), indent=1) + "\n")
    if any("error" in row and row["form"] == "ours" for row in rows):
        sys.exit(1)


def record(copy: float, rows: list[dict[str, Any]], device: torch.device) -> dict[str, Any]:
    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "triton", "liger-kernel")},
        "copy_gbs": copy,
        "rows": rows,
    }


if __name__ == "__main__":
    main()
