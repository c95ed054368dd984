"""Every kernel beside plain torch, torch.compile and Liger-Kernel, in one run.

    python benchmarks/kernels/run.py [--quick | --tiny] [--only rms_norm,rope] [--forms ours,eager,compile,liger]
        [--compile all|first|none] [--seconds N] [--out FILE [--again]] [--show FILE]

Device time is the median replay of a CUDA graph of several calls (`timed_by`: events where a form cannot be captured),
so the host's launches do not count; what they cost is the host column: how long a call of forward and backward keeps
the host. Memory-bound forms take several copies of small inputs in turn, lest a cache flatters them. Extra memory is
the peak beyond inputs, results and gradients, in GiB. Shares are of the bandwidth of a large copy in the same run.

Rows go to FILE as they are measured, in the order of importance. Rows already there are kept and not measured again:
a run that was cut short goes on where it stopped; `--again` repeats what has failed. `--quick` is every op at its first
shape, in a few minutes; `--tiny` runs small shapes on any device, to see that everything works; `--show` prints the
table of a file.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import os
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
from measure import CALLS, copies, copy_gbs, measure  # noqa: E402
from table import line, table  # noqa: E402

APART = ("run", "case", "measure", "table")
FIRST = (
    "linear_cross_entropy", "cross_entropy", "fp8_linear", "rms_norm", "gated", "rope", "layer_norm", "add_rms_norm",
    "softmax", "attention", "experts", "embedding", "dropout_add", "gelu_bias", "global_norm", "adamw",
    "group_norm", "modulate", "quantized_linear",
)  # fmt: skip
Row = dict[str, Any]


def modules(only: list[str]) -> Iterator[tuple[str, Any]]:
    """The files of this folder by importance."""
    stems = sorted(path.stem for path in HERE.glob("*.py") if path.stem not in APART)
    unknown = set(only) - set(stems)
    if unknown:
        sys.exit(f"no such file in {HERE.name}: {', '.join(sorted(unknown))}")
    for stem in sorted(stems, key=lambda stem: FIRST.index(stem) if stem in FIRST else len(FIRST)):
        if only and stem not in only:
            continue
        spec = importlib.util.spec_from_file_location(stem, HERE / f"{stem}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield stem, module


def chosen(options: argparse.Namespace) -> Iterator[tuple[Case, list[str]]]:
    """Cases with the forms to measure."""
    forms = options.forms.split(",")
    compiled = options.compile or ("first" if options.quick else "all")
    for _, module in modules([name for name in options.only.split(",") if name]):
        seen: set[str] = set()
        for case in module.cases(options.tiny):
            if options.ops and case.op not in options.ops.split(","):
                continue
            fresh = case.op not in seen
            seen.add(case.op)
            if options.quick and not fresh:
                continue
            others = [f"ours {name}" for name in case.others] if "ours" in forms else []
            peers = [f for f in forms if f != "ours"]
            if compiled == "none" or (compiled == "first" and not fresh):
                peers = [f for f in peers if f != "compile"]
            yield case, [f for f in forms if f == "ours"] + others + peers  # a peer may write over its inputs


def function(case: Case, form: str) -> Callable | None:
    """What a form calls; None if there is none."""
    if form == "ours":
        return case.ours
    if form == "eager":
        return case.eager
    if form == "compile":
        torch._dynamo.reset()
        return torch.compile(case.eager, dynamic=False)
    if form == "liger":
        return None if case.liger is None else case.liger()
    return case.others[form.removeprefix("ours ")]


def rates(case: Case, row: Row) -> Row:
    """GB/s of the bytes that must move and TFLOP/s of the products."""
    found: Row = {}
    for part in ("forward", "backward"):
        moved, flops, ms = (
            getattr(case, f"{part}_bytes"),
            getattr(case, f"{part}_flops"),
            row.get(f"{part}_ms"),
        )
        if ms and ms > 0:
            found[f"{part}_gbs"], found[f"{part}_tflops"] = moved / ms / 1e6, flops / ms / 1e9
    return found


def broken(device: torch.device) -> bool:
    """Whether an error has left the device unusable for this process."""
    try:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.rand(1, device=device).item()
    except Exception:
        return True
    return False


class Record:
    """Rows of a run and the file that keeps them."""

    def __init__(self, path: Path | None, device: torch.device):
        self.path = path
        old = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self.rows: list[Row] = old.get("rows", [])
        self.head: Row = {k: v for k, v in old.items() if k != "rows"} or head(device)

    def __contains__(self, key: tuple[str, str, str]) -> bool:
        return any((row["op"], row["shape"], row["form"]) == key for row in self.rows)

    def add(self, row: Row) -> None:
        """Keep a row, in the file at once."""
        self.rows.append(row)
        print(line(row, self.head["copy_gbs"]), flush=True)
        if self.path is not None:
            fresh = self.path.with_suffix(".part")
            fresh.write_text(json.dumps({**self.head, "rows": self.rows}, indent=1) + "\n")
            os.replace(fresh, self.path)


def head(device: torch.device) -> Row:
    """What a result is worth nothing without."""

    def version(name: str) -> str | None:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return None

    return {
        "command": " ".join(sys.argv),
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "versions": {name: version(name) for name in ("torch", "triton", "liger-kernel")},
        "copy_gbs": copy_gbs(device),
    }


def one(case: Case, form: str, sets: list[tuple[Any, ...]], device: torch.device) -> Row | None:
    """The row of one form; an error is a row too."""
    row: Row = {"op": case.op, "shape": case.shape, "form": form}
    start = time.perf_counter()
    try:
        fn = function(case, form)
        if fn is None:
            return None
        row |= measure(fn, sets, device)
        row |= rates(case, row)
    except Exception as error:
        row["error"] = repr(error)[:500]
    row["spent_s"] = time.perf_counter() - start
    return row


def run(options: argparse.Namespace, device: torch.device, record: Record) -> None:
    """Measure what is not recorded yet; after an error that breaks the device, go on in a new process."""
    start = time.perf_counter()
    for case, wanted in chosen(options):
        left = [form for form in wanted if (case.op, case.shape, form) not in record]
        if not left:
            continue
        if options.seconds and time.perf_counter() - start > options.seconds:
            print(f"{options.seconds:.0f} s are over; the same command goes on from here")
            return
        sets: list[tuple[Any, ...]] = []
        for form in left:
            try:
                sets = sets or copies(case.make(device), CALLS if case.forward_bytes else 1)
            except Exception as error:
                record.add({"op": case.op, "shape": case.shape, "form": form, "error": repr(error)[:500]})
                continue
            row = one(case, form, sets, device)
            if row is not None:
                record.add(row)
            if row is not None and "error" in row and broken(device):
                if record.path is None:
                    sys.exit("the device is lost to this process; --out lets a run go on in a new one")
                os.execv(sys.executable, [sys.executable, *(a for a in sys.argv if a != "--again")])
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="files of this folder, by comma")
    parser.add_argument("--ops", default="", help="names of operations, by comma")
    parser.add_argument("--forms", default="ours,eager,compile,liger")
    parser.add_argument("--compile", choices=("all", "first", "none"), help="which shapes are compiled")
    parser.add_argument("--seconds", type=float, default=0, help="start no case after so many")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--show", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    if options.show:
        found = json.loads(options.show.read_text())
        print(table(found["rows"], found["copy_gbs"]))
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = Record(options.out, device)
    if options.again:
        record.rows = [row for row in record.rows if "error" not in row]
    print(f"copy: {record.head['copy_gbs']:.0f} GB/s")
    run(options, device, record)
    print(table(record.rows, record.head["copy_gbs"]))
    if any("error" in row and row["form"].startswith("ours") for row in record.rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
