"""Run the sweep row by row into docs/proof/sweep.json, and write docs/models.md from it.

python tests/sweep/table.py [--types a,b] [--columns x,y] [--force] [--page]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import transformers

from cai_mesh.testing import RankError, run_ranks
from sweep import columns, page, plain_loop
from sweep.columns import COLUMNS, Crashed, Refused
from sweep.configs import NotBuilt, model_types, tiny
from sweep.plain_loop import Reference, Trained

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "proof" / "sweep.json"
TIMEOUT = 120.0
"""Seconds a cell may take; tiny models need a few, and the first of a process imports transformers."""

LOSS, NORM, PARAMETER = 1e-6, 5e-5, 0.005
ROUNDINGS = 4.0
"""Largest differences in float32: of a loss and of the gradients' norm relative to the plain loop's, and of a
parameter in learning rates. Sums in another order move a loss by a few 1e-7 and the norm, of squares of many sizes,
by up to 2e-5. AdamW divides a gradient by its own size, so what rounding moves is a small part of a step (0.001), while
a step left out, taken twice or with another sign is one learning rate. Some models amplify rounding (a norm of
embeddings that are almost zero). How much is measured: the plain loop runs in float64, too, and the difference between
the two, times ROUNDINGS, is allowed of a loss, of the norm, and of each parameter by itself."""

Entry = dict[str, Any]


def main() -> None:
    options = arguments()
    rows = options.types.split(",") if options.types else model_types()
    chosen = options.columns.split(",") if options.columns else list(COLUMNS)
    if not options.page:
        for number, model_type in enumerate(rows, 1):
            told = run_row(model_type, chosen, force=options.force)
            print(f"{number:>3}/{len(rows)} {model_type:<28} {told}", flush=True)
    page.write(results())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--types", help="model types, by commas; all of them without it")
    parser.add_argument("--columns", help="columns, by commas; all of them without it")
    parser.add_argument("--force", action="store_true", help="run cells that have a valid entry, too")
    parser.add_argument("--page", action="store_true", help="run nothing, write the page")
    return parser.parse_args()


def results() -> dict[str, dict[str, Entry]]:
    """Everything recorded: model type -> "plain" or a column -> entry."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def record(model_type: str, column: str, entry: Entry) -> None:
    table = results()
    table.setdefault(model_type, {})[column] = entry
    RESULTS.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")


def run_row(model_type: str, chosen: list[str], *, force: bool) -> str:
    """Run the cells of a row that have no valid entry; returns what to say of the row."""
    key, known = content(model_type), results().get(model_type, {})
    missing = [name for name in chosen if force or not _valid(known.get(name), key)]
    if not force and _valid(known.get("plain"), key) and known["plain"]["outcome"] == "not built":
        missing = []
    if not missing:
        return "recorded before"
    found, entry = reference(model_type)
    record(model_type, "plain", key | entry)
    if found is None:
        return f"{entry['outcome']}: {entry.get('reason', '')}"
    said = []
    for name in missing:
        entry = cell(name, model_type, found)
        record(model_type, name, key | entry)
        said.append(f"{name}: {entry['outcome']}")
    return ", ".join(said)


def content(model_type: str) -> Entry:
    """What a result depends on: the git tree of packages/ (None with changes that are not committed), and the ask."""

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    tree = None if git("status", "--porcelain", "packages") else git("rev-parse", "HEAD:packages")
    try:
        asked = tiny(model_type).to_json_string(use_diff=False)
    except NotBuilt as reason:
        asked = str(reason)
    asked += Path(plain_loop.__file__).read_text()
    return {
        "sources": tree,
        "asked": hashlib.sha256(asked.encode()).hexdigest()[:16],
        "transformers": transformers.__version__,
        "torch": torch.__version__,
    }


def _valid(entry: Entry | None, key: Entry) -> bool:
    return entry is not None and key["sources"] is not None and all(entry[k] == v for k, v in key.items())


def reference(model_type: str) -> tuple[Reference | None, Entry]:
    """The plain loop of a row and its entry; None where there is nothing to compare with."""
    found, seconds = _on_ranks(1, columns.run_plain, model_type)
    if isinstance(found, NotBuilt):
        return None, {"outcome": "not built", "reason": str(found), "seconds": seconds}
    if isinstance(found, Crashed):
        return None, {"outcome": "crashed", "reason": found.reason, "seconds": seconds}
    count = sum(p.numel() for p in found.trained.parameters.values())
    entry = {"outcome": "ran", "parameters": count, "losses": found.trained.losses, "seconds": seconds}
    if found.exact is not None:
        entry["rounding"] = summary(differences(found.exact, found.trained))
    if found.random:
        entry["random"] = True
    if found.strange:
        entry["strange"] = found.strange
    return found, entry


def cell(column: str, model_type: str, expected: Reference) -> Entry:
    """Run one cell and say what came of it."""
    got, seconds = _on_ranks(COLUMNS[column].ranks, columns.run_cell, column, model_type)
    if isinstance(got, Refused):
        return {"outcome": "refused", "reason": got.message, "seconds": seconds}
    if isinstance(got, Crashed):
        return {"outcome": "crashed", "reason": got.reason, "seconds": seconds}
    found = differences(got, expected.trained)
    rounding = {} if expected.exact is None else differences(expected.exact, expected.trained)
    wrong = expected.strange or too_much(found, rounding)
    exact = settled(column, model_type) if wrong and not expected.strange else None
    shared = {} if got.shares is None else {"shares": [round(share, 3) for share in got.shares]}
    if exact is not None and not too_much(exact, {}):
        return {
            "outcome": "right",
            "float64": summary(exact),
            "differences": summary(found),
            "seconds": seconds,
        } | shared
    outcome = {"outcome": "wrong", "reason": wrong} if wrong else {"outcome": "right"}
    return outcome | {"differences": summary(found), "seconds": seconds} | shared


def settled(column: str, model_type: str) -> dict[str, float] | None:
    """How a column of several ranks differs from one rank in float64; None for one of one rank, or that fails there.

    Ranks that share a layer or its sums add in another order than the plain loop, and some models amplify that. One
    rank is compared with the plain loop in float32, in a column of its own.
    """
    if COLUMNS[column].ranks == 1:
        return None
    alone, _ = _on_ranks(1, columns.run_cell, "one rank", model_type, "fp64")
    shared, _ = _on_ranks(COLUMNS[column].ranks, columns.run_cell, column, model_type, "fp64")
    if not (isinstance(alone, Trained) and isinstance(shared, Trained)):
        return None
    return differences(shared, alone)


def _on_ranks(ranks: int, function: Callable, *args: Any) -> tuple[Any, float]:
    """What the first rank says, or the first one that has something to complain of; and the seconds it took."""
    start = time.monotonic()
    try:
        answers = run_ranks(ranks, function, *args, timeout=TIMEOUT)
    except RankError as error:
        text = str(error)
        reason = "timeout" if "did not finish in time" in text else text.strip().splitlines()[-1]
        answers = [Crashed(reason, text)]
    seconds = round(time.monotonic() - start, 1)
    complaints = [a for a in answers if isinstance(a, (Crashed, Refused))]
    for crash in complaints[:1]:
        if isinstance(crash, Crashed) and "SWEEP_TRACE" in os.environ:
            print(crash.trace, file=sys.stderr)
    return (complaints or answers)[0], seconds


def differences(got: Trained, expected: Trained) -> dict[str, float]:
    """By "loss", "norm" (relative) and the parameters' names (in learning rates); infinite where one is missing."""
    losses = [abs(a - b) / abs(b) for a, b in zip(got.losses, expected.losses, strict=True)]
    norm = abs(got.norm - expected.norm) / max(expected.norm, 1e-12)
    moved = {}
    for name in sorted(set(got.parameters) | set(expected.parameters)):
        a, b = got.parameters.get(name), expected.parameters.get(name)
        if a is None or b is None or a.shape != b.shape:
            moved[name] = math.inf
        elif a.numel():
            moved[name] = float((a.double() - b.double()).abs().max()) / plain_loop.LR
    return {"loss": max(losses), "norm": norm, **moved}


def summary(found: dict[str, float]) -> Entry:
    """The loss, the norm and the parameter that differs most."""
    worst = max(found.keys() - {"loss", "norm"}, key=lambda name: found[name])
    numbers = {"loss": found["loss"], "norm": found["norm"], "parameter": found[worst]}
    return {name: float(f"{value:.2g}") for name, value in numbers.items()} | {"of": worst}


def too_much(found: dict[str, float], rounding: dict[str, float]) -> str:
    """The difference furthest beyond the tolerances and what rounding explains, or ""; NaN is."""
    tolerances = {"loss": LOSS, "norm": NORM}
    beyond = {}
    for name, value in found.items():
        allowed = max(tolerances.get(name, PARAMETER), ROUNDINGS * rounding.get(name, 0.0))
        if not value <= allowed:
            beyond[name] = value / allowed
    if not beyond:
        return ""
    worst = max(beyond, key=lambda name: beyond[name])
    if worst in tolerances:
        return f"the {worst} differs by {found[worst]:.1e} of it"
    return f"{worst} differs by {found[worst]:.2g} learning rates"


if __name__ == "__main__":
    main()
