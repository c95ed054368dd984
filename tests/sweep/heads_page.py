"""docs/heads.md of docs/proof/heads.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from sweep.kinds import KINDS

OUTCOMES = ("right", "refused", "wrong", "crashed")
BEGINNING = """# Models with other heads

Every model type for which transformers has a masked or a sequence-to-sequence language model, an image classifier or a
speech model, built tiny and trained for two steps by its own loss, in float64, as a plain loop does and with one call
of cai before it; then evaluated. **right** is equal within 5e-7 in every loss and weight, **refused** an error of cai.
Dropout of every kind and SpecAugment are off. An image classifier without a loss gets cross-entropy. Of a speech type
that transformers has several heads for, the first of CTC, text and classes is run. Written by
`python tests/sweep/heads.py`; the whole messages are in `docs/proof/heads.json`.
"""


def page(table: Mapping[str, dict[str, Any]], columns: Mapping[str, str]) -> str:
    """The page of all results; `columns` says what each is."""
    lines = [BEGINNING, *(f"- **{name}**: {what}." for name, what in columns.items())]
    for kind, what in KINDS.items():
        rows = {key.split(":")[1]: row for key, row in table.items() if key.startswith(f"{kind}:")}
        ran = {name: row for name, row in sorted(rows.items()) if "not built" not in row}
        lines += [f"\n## {what.title}: {len(rows)} types, {len(ran)} run here\n", *_counts(ran, columns)]
        lines += ["", *_cells(ran, columns, heads=len(what.mappings) > 1)]
        lines += _reasons(ran, columns)
        lines += _not_built({name: row for name, row in sorted(rows.items()) if "not built" in row})
    return "\n".join(lines).rstrip() + "\n"


def _counts(ran: Mapping[str, dict[str, Any]], columns: Mapping[str, str]) -> list[str]:
    lines = [f"| | {' | '.join(OUTCOMES)} |", "|---|--:|--:|--:|--:|"]
    for column in columns:
        found = Counter(_outcome(row, column) for row in ran.values())
        lines.append(f"| {column} | {' | '.join(str(found[outcome]) for outcome in OUTCOMES)} |")
    return lines


def _outcome(row: Mapping[str, Any], column: str) -> str:
    return row[column]["outcome"] if column in row else "not run"


def _cells(ran: Mapping[str, dict[str, Any]], columns: Mapping[str, str], *, heads: bool) -> list[str]:
    lines = [f"| type | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for name, row in ran.items():
        title = f"{name} ({row['head']})" if heads else name
        lines.append(f"| {title} | {' | '.join(_outcome(row, column) for column in columns)} |")
    return lines


def _reasons(ran: Mapping[str, dict[str, Any]], columns: Mapping[str, str]) -> list[str]:
    """Why cells are refused, the most frequent reason first, with the types."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, row in ran.items():
        for column in columns:
            if _outcome(row, column) in OUTCOMES[1:]:
                found.setdefault((column, why(row[column]["reason"])), []).append(name)
    if not found:
        return []
    ordered = sorted(found.items(), key=lambda each: (list(columns).index(each[0][0]), -len(each[1])))
    lines = ["", "| column | why | types |", "|---|---|---|"]
    return [*lines, *(f"| {column} | {reason} | {', '.join(names)} |" for (column, reason), names in ordered)]


def why(reason: str) -> str:
    """What an error says, without the model it says it of; of a plan that is missing why none was found."""
    lines = reason.strip().splitlines()
    cause = next((line.partition("cause:")[2].strip() for line in lines if "cause:" in line), "")
    said = (
        f"no plan: {cause or lines[0]}"
        if lines[0].startswith("there is no tensor-parallel plan")
        else lines[0]
    )
    said = re.sub(r"parameter '[^']*'", "a parameter", said.replace("|", "/"))
    return re.sub(
        r"(no small )?\b[A-Z]\w*[a-z0-9][A-Z]\w*", lambda m: "no small model" if m[1] else "it", said
    )


def _not_built(rows: Mapping[str, dict[str, Any]]) -> list[str]:
    lines = [f"- {name}: {row['not built'].strip()}" for name, row in rows.items()]
    return ["\nNot run here, since the plain loop does not run:\n", *lines] if lines else []
