"""Two versions of cai in turn: each one's `session.py` run after run, before, after, …; medians and one JSON file.

    git worktree add ../before 9e81c9c
    python benchmarks/turns.py --before ../before --gpus 2 --out turns.json \
        --form "zero3 llama-8b memory.recompute=none train.microbatch_size=2 train.global_batch=4" \
        --after "fp8 llama-8b memory.recompute=none train.microbatch_size=2 train.global_batch=4 precision.linear=fp8"

A form is a name, a recipe and values of it. Forms given with `--after` run on this version alone, in the same turns. A
run that fails is written down with the end of its output; the others go on. No run starts that the time left would cut.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--before", type=Path, required=True, help="a checkout of the version to compare with"
    )
    parser.add_argument(
        "--form", action="append", default=[], help="NAME RECIPE [KEY=VALUE ...]; both versions"
    )
    parser.add_argument("--after", action="append", default=[], help="the same, of this version alone")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--gpus", type=int, default=1, help="ranks of a run")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="end by then")
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


def sources(checkout: Path) -> str:
    return os.pathsep.join(str(path.resolve()) for path in sorted(checkout.glob("packages/*/src")))


def run(form: str, version: str, checkout: Path, options: argparse.Namespace, timeout: float | None) -> dict:
    """One run of a checkout's own `session.py` on its sources."""
    name, recipe, *values = form.split()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "row.jsonl"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.gpus)),
            *(str(checkout / "benchmarks" / "session.py"), recipe, "--form", name, "--out", str(out)),
            *("--steps", str(options.steps), "--warmup", str(options.warmup), "--set", *values),
        ]  # fmt: skip
        environment = os.environ | {"PYTHONPATH": sources(checkout)}
        start = time.monotonic()
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
            failed = done.stderr[-2000:] if done.returncode else ""
        except subprocess.TimeoutExpired:
            failed = "cut off at the end of the time"
        row = {"error": failed} if failed else json.loads(out.read_text().splitlines()[-1])
    return {"form": name, "version": version, "seconds": round(time.monotonic() - start, 1)} | row


def summary(rows: list[dict]) -> list[dict]:
    """Medians by form and version."""
    found = []
    for form, version in dict.fromkeys((row["form"], row["version"]) for row in rows):
        mine = [r for r in rows if (r["form"], r["version"]) == (form, version) and "error" not in r]
        if mine:
            rates = [r["tokens_per_second_per_gpu"] for r in mine]
            peaks = [r["peak_gib"] for r in mine if r["peak_gib"] is not None]
            found.append(
                {"form": form, "version": version, "runs": len(mine), "tokens_per_second_per_gpu": rates,
                 "median": statistics.median(rates), "peak_gib": max(peaks, default=None)}
            )  # fmt: skip
    return found


def main() -> None:
    options = arguments()
    end = time.monotonic() + options.seconds
    turn = [(f, v, c) for f in options.form for v, c in (("before", options.before), ("after", HERE))]
    turn += [(form, "after", HERE) for form in options.after]
    rows: list[dict] = []
    longest: dict[tuple[str, str], float] = {}
    for _ in range(options.runs):
        for form, version, checkout in turn:
            left = end - time.monotonic()
            if left < 1.1 * longest.get((form, version), 0.0):
                continue
            row = run(form, version, checkout, options, None if left == float("inf") else max(left, 1.0))
            longest[form, version] = max(longest.get((form, version), 0.0), row["seconds"])
            rows.append(row)
            shown = row.get("error") or (row["tokens_per_second_per_gpu"], row["peak_gib"])
            print(row["form"], version, shown, f"{row['seconds']} s", flush=True)
            command = " ".join(["python", "benchmarks/turns.py", *sys.argv[1:]])
            text = {"command": command, "medians": summary(rows), "runs": rows}
            options.out.write_text(json.dumps(text, indent=1) + "\n")
    for row in summary(rows):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
