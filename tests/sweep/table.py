"""Run the sweep row by row into docs/proof/sweep.json, and write docs/models.md from it.

python tests/sweep/table.py [--types a,b] [--columns x,y] [--force] [--page]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))

import columns
import page
import plain
import torch
import transformers
from columns import COLUMNS, Crashed, Refused
from configs import NotBuilt, model_types, tiny
from plain import Reference, Trained

from cai_mesh.testing import RankError, run_ranks

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "proof" / "sweep.json"
TIMEOUT = 120.0
"""Seconds a cell may take; tiny models need a few, and the first of a process imports transformers."""

LOSS, NORM, PARAMETER = 1e-5, 1e-4, 0.02
"""Largest differences in float32: of a loss and of the gradients' norm relative to the plain loop's, and of a
parameter in learning rates. Sums in another order differ by about 1e-7 a term, 1e-6 in a loss after a step. AdamW
moves a parameter by up to one learning rate a step whatever the size of its gradient, so a gradient near `EPS` with a
rounding of 1e-8 moves it by a thousandth of one more or less, and twice a step taken in its wake; a step left out,
taken twice or with another sign is one whole learning rate."""

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
    asked += Path(plain.__file__).read_text()
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
    wrong = expected.strange or _too_much(found)
    outcome = {"outcome": "wrong", "reason": wrong} if wrong else {"outcome": "right"}
    return outcome | {"differences": found, "seconds": seconds}


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


def differences(got: Trained, expected: Trained) -> Entry:
    """Largest differences of the losses and the norm (relative) and of a parameter (in learning rates), and where."""
    losses = [abs(a - b) / abs(b) for a, b in zip(got.losses, expected.losses, strict=True)]
    norm = abs(got.norm - expected.norm) / max(expected.norm, 1e-12)
    missing = sorted(set(got.parameters) ^ set(expected.parameters))
    if missing:
        return {"loss": max(losses), "norm": norm, "names": missing[:3]}
    moved = {
        name: float((got.parameters[name].double() - value.double()).abs().max()) / plain.LR
        for name, value in expected.parameters.items()
        if value.numel()
    }
    worst = max(moved, key=lambda name: moved[name])
    return {"loss": max(losses), "norm": norm, "parameter": moved[worst], "of": worst}


def _too_much(found: Entry) -> str:
    """Which difference is beyond what rounding explains, or ""; NaN is."""
    if "names" in found:
        return f"other parameter names: {found['names']}"
    if not found["loss"] <= LOSS:
        return f"a loss differs by {found['loss']:.1e} of it"
    if not found["norm"] <= NORM:
        return f"the norm of the first gradients differs by {found['norm']:.1e} of it"
    if not found["parameter"] <= PARAMETER:
        return f"{found['of']} differs by {found['parameter']:.2g} learning rates"
    return ""


if __name__ == "__main__":
    main()
