"""What the model of a run said after its validations, as a table of the page."""

from __future__ import annotations

import html

from cai_apps.run.files.directory import RunDirectory
from cai_apps.run.loop import metrics

SHOWN = 8
"""Steps that are shown of each prompt: the first, and the last ones."""
BLANK = '<span class="quiet">white space only</span>'


def texts_html(run: RunDirectory) -> str:
    """The texts of a run, by prompt and step; "" where there are none.

    Raises:
        DataError: the file with them is broken.
    """
    if not run.texts.is_file():
        return ""
    by_name: dict[str, list[tuple[int, str]]] = {}
    for record in metrics.read(run.texts):
        name, text = (str(record.get(key, "")) for key in ("name", "text"))
        by_name.setdefault(name, []).append((record["step"], text))
    tables = [
        f"<h3>after <code>{html.escape(name)}</code></h3><table>{''.join(map(_row, _some(rows)))}</table>"
        for name, rows in by_name.items()
    ]
    return f"<h2>Samples by step</h2>{''.join(tables)}" if tables else ""


def _some(rows: list[tuple[int, str]]) -> list[tuple[int, str]]:
    """Return the first row and the last ones."""
    return rows if len(rows) <= SHOWN else [rows[0], *rows[1 - SHOWN :]]


def _row(row: tuple[int, str]) -> str:
    step, text = row
    cell = f"<pre>{html.escape(text)}</pre>" if text.strip() else BLANK
    return f"<tr><th>step {step:,}<td>{cell}"
