"""docs/models.md, written from docs/proof/sweep.json."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from sweep.columns import COLUMNS
from sweep.shares import ENOUGH

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
OUTCOMES = ("right", "refused", "wrong", "crashed")
Table = dict[str, dict[str, dict[str, Any]]]

INTRODUCTION = """# Models

Every model type for which transformers {transformers} has a causal language model: {all} of them, {ran} of which build
and run by themselves from a tiny config on a CPU (torch {torch}). Each of those was trained for three optimizer steps
in float32, dropout off, by cai and by a plain loop of transformers and torch: forward, cross-entropy, backward, clip,
AdamW; then evaluated on another batch, in evaluation mode. A cell is

- **right** when the loss of every step and of the evaluation, the norm of the first gradients and all parameters at the
  end are those of the plain loop, within what rounding explains; a cell of several ranks that differs more, because
  they add in another order, is right where it equals one rank in float64 within the same bounds;
- **refused** when cai said before training that it would not, and why;
- **wrong** or **crashed** otherwise.

This page is written from [`sweep.json`](proof/sweep.json), which also has the differences, by `nox -s sweep`. How close
is close enough is said in `tests/sweep/table.py`.
"""


def write(table: Table) -> None:
    PAGE.write_text(text(table))


def text(table: Table) -> str:
    """The whole page."""
    ran = {name: row for name, row in table.items() if row["plain"]["outcome"] == "ran"}
    first = next(iter(table.values()))["plain"]
    parts = [
        INTRODUCTION.format(
            all=len(table), ran=len(ran), transformers=first["transformers"], torch=first["torch"]
        ),
        "## Columns\n",
        *(f"- **{name}**: {column.what}" for name, column in COLUMNS.items()),
        "",
        *_counts(ran),
        *_shared(ran),
        "## Types\n",
        *_rows(ran),
        *_reasons(table, ran),
    ]
    return "\n".join(parts).rstrip() + "\n"


def _counts(ran: Table) -> list[str]:
    lines = [f"| | {' | '.join(OUTCOMES)} |", f"|---|{'--:|' * len(OUTCOMES)}"]
    for name in COLUMNS:
        found = [row[name]["outcome"] for row in ran.values() if name in row]
        lines.append(f"| {name} | {' | '.join(str(found.count(outcome)) for outcome in OUTCOMES)} |")
    return [*lines, ""]


def _shared(ran: Table) -> list[str]:
    """How many types tensor-parallel ranks share almost all of, for every column that says so."""
    lines = []
    for name in COLUMNS:
        found = [row[name]["shares"] for row in ran.values() if "shares" in row.get(name, {})]
        if found:
            both = sum(min(shares) >= ENOUGH for shares in found)
            nearly = (
                sum(shares[0] >= ENOUGH for shares in found),
                sum(shares[1] >= ENOUGH for shares in found),
            )
            lines.append(
                f"- {name}: of {len(found)} types that are right the ranks share at least {ENOUGH:.0%} of the bytes "
                f"of the blocks' parameters in {nearly[0]}, of the FLOPs of their products in {nearly[1]}, of both "
                f"in {both}"
            )
    return [*lines, ""] if lines else []


def _rows(ran: Table) -> list[str]:
    lines = [f"| type | parameters | {' | '.join(COLUMNS)} |", f"|---|--:|{'---|' * len(COLUMNS)}"]
    for name, row in sorted(ran.items()):
        cells = (_word(row.get(column)) for column in COLUMNS)
        lines.append(f"| {name} | {row['plain']['parameters']:,} | {' | '.join(cells)} |")
    return [*lines, ""]


def _word(entry: dict[str, Any] | None) -> str:
    if entry is None:
        return ""
    if entry["outcome"] != "right":
        return f"**{entry['outcome']}**"
    least = min(entry.get("shares", [1.0]))
    return "right" if least >= ENOUGH else f"right ({least:.0%} shared)"


def _reasons(table: Table, ran: Table) -> list[str]:
    lines = []
    for outcome in OUTCOMES[1:]:
        reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for name, row in sorted(ran.items()):
            for column in COLUMNS:
                if row.get(column, {}).get("outcome") == outcome:
                    reasons[row[column]["reason"]][name].append(column)
        if reasons:
            lines += [f"## {outcome.capitalize()}\n", *_listed(reasons), ""]
    random = [name for name, row in sorted(ran.items()) if row["plain"].get("random")]
    if random:
        lines += ["## Random numbers\n", "Draw random numbers while they train, with every dropout at zero:"]
        lines += [f"{', '.join(random)}.", ""]
    absent = sorted(set(table) - set(ran))
    if absent:
        lines += ["## Not built\n", "transformers itself does not get these to train here:\n"]
        lines += [f"- {name}: {_escaped(table[name]['plain']['reason'])}" for name in absent]
    return lines


def _listed(reasons: dict[str, dict[str, list[str]]]) -> list[str]:
    lines = []
    for reason, names in reasons.items():
        for name, columns in names.items():
            where = "" if len(columns) == len(COLUMNS) else f" ({', '.join(columns)})"
            lines.append(f"- {name}{where}:\n\n{_block(reason)}\n")
    return lines


def _block(reason: str) -> str:
    return "\n".join(f"        {line}" for line in reason.splitlines())


def _escaped(reason: str) -> str:
    return re.sub(r"([*_`<>|\[\]])", r"\\\1", reason)
